"""The evaluation text is frozen: every perplexity of the course depends on it."""

import hashlib

from course.lm import evaluation_text

SHA256 = "3ba49532fef81b104514b021cc70a8ed3404d32a1d019280fb534af83f4760aa"


def test_it_is_the_text_that_was_measured() -> None:
    assert hashlib.sha256(evaluation_text().encode()).hexdigest() == SHA256


def test_it_is_long_enough_and_plain(smollm2) -> None:
    text = evaluation_text()
    assert text.isascii() and text.endswith("\n") and "\r" not in text
    ids = smollm2.tokenizer.encode(text)
    assert 7_500 < len(ids) < 8_500
    assert smollm2.tokenizer.decode(ids) == text
