"""Text that others wrote, made fit to be printed: it shows what it holds, and commands nothing."""

import re

_ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-9;?]*[ -/]*[@-~]|\x1b[@-_]")
# control characters but for tab and line feed, and what makes text read otherwise than it is stored
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def plain(text: str) -> str:
    """Text without terminal escapes, control and invisible characters.

    Half a surrogate, which no UTF-8 file can hold, becomes its escape.
    """
    whole = text.encode("utf-8", "backslashreplace").decode()
    return _UNSEEN.sub("", _ESCAPES.sub("", whole))


def line(text: str) -> str:
    """The same in one line: a name must not begin a line of its own in a log."""
    return " ".join(plain(text).split())
