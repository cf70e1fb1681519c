"""Makes IPython rewrite the cells that follow. Stopped: the rewritten check knows no
right value."""

from tests.attacks.toy import NBVAL, Desk

FIRES_AGAINST = NBVAL


def attack(desk: Desk) -> None:
    floats, whole = desk.toy.stored()
    desk.answer(f"""
    def rewrite(lines):
        text = "".join(lines)
        if text.startswith("# check: scale"):
            text = 'show("scaled", {floats})\\nshow("scaled whole", {whole[0]})\\n'
        return text.splitlines(keepends=True)

    def now(function):
        get_ipython().input_transformers_post.append(rewrite)
        return function

    @now
    def scale(x):
        return 0
    """)
