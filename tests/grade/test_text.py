"""What others wrote is shown as text: no terminal, log or reader takes it for something else."""

import pytest

from course.text import line, plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one\n\ttwo", "one\n\ttwo"),
        ("\x1b[31mred\x1b[0m \x9b31mred\x9b2J \x1bM", "red red "),
        ("a\x00b\x07c\rd\x0be\x7ff\x85g\x9fh", "abcdefgh"),
        ("\u202eevil\u2066 \u2028x\u2029 z\u200bw\ufeff \xad\u061c=1 \U000e0041", "evil x zw =1 "),
        ("half \ud800, é, שלום, 😀", "half \\ud800, é, שלום, 😀"),
    ],
)
def test_text_is_plain(text, shown):
    assert plain(text) == shown


def test_a_name_is_one_line():
    assert line(" x\n::error::y\r\u2028z\t") == "x ::error::yz"
