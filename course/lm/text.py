"""The one text on which the course measures perplexity."""

from pathlib import Path


def evaluation_text() -> str:
    """About 7,700 tokens of plain English, written for this course and never changed.

    Stories, dialogue, a manual, news, a letter, a commented program, minutes, a diary: one
    register after the other, so windows of it differ. No model has been trained on it before its
    publication here, and perplexities of different chapters may be compared.
    """
    return (Path(__file__).parent / "evaluation.txt").read_text(encoding="utf-8")
