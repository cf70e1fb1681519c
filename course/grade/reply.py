"""Read what a box claims. Learners' code may have written it: any bytes must be harmless here."""

import json
import math
import re
from typing import Any

from course.shell import Ran

INT_DIGITS = 1000  # in the box and here; Python's limit is 4,300, honest lines show far less
_MAX_DEPTH = 16
# an open string reaches to the end: looking for strings inside it again would be quadratic
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_SURROGATE = re.compile(rb"(?<!\\)(?:\\\\)*\\u[dD][89a-fA-F]")
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


class Malformed(Exception):
    """The bytes are not one reply; the text says why, in our own words."""


def parse(data: bytes) -> Any:
    """One JSON value, strictly: no duplicate keys, NaN, infinities, long integers, lone surrogates.

    Takes time and memory linear in `data`. Raises Malformed and nothing else.
    """
    _check_depth(data)
    if _SURROGATE.search(data):  # we send UTF-8, where half a character cannot stand
        raise Malformed("an escaped surrogate")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_int,
            parse_float=_float,
            parse_constant=_constant,
        )
    except (ValueError, RecursionError, MemoryError) as problem:
        text = "" if isinstance(problem, UnicodeError) else str(problem)
        raise Malformed(text[:200] or type(problem).__name__) from None


def checks(data: bytes, keys: list[str]) -> dict[str, Ran]:
    """What each exercise's check did, in the order of `keys`, which must all be there.

    Raises Malformed; a setup cell that failed is one too, since the box's word is all we have.
    """
    reply = parse(data)
    if not _has(reply, {"setup": str, "checks": dict}):
        raise Malformed("not a reply")
    if reply["setup"]:
        raise Malformed(f"the setup cell fails: {reply['setup'][:200]}")
    if set(reply["checks"]) != set(keys):
        raise Malformed("other exercises than those of the job")
    return {key: _ran(reply["checks"][key]) for key in keys}


def _ran(value: Any) -> Ran:
    if not _has(value, {"shown": list, "error": str, "seconds": float}):
        raise Malformed("a check without lines, error or seconds")
    for line in value["shown"]:
        if not (
            _has(line, {"name": str, "values": list, "tol": float, "part": int})
            and all(type(token) in (int, float, str) for token in line["values"])
        ):
            raise Malformed("a line that is none")
    return Ran(value["shown"], value["error"], value["seconds"])


def _has(value: Any, types: dict[str, type]) -> bool:
    """Whether `value` is a dict with exactly these keys and types (an int serves as a float)."""
    return (
        type(value) is dict
        and value.keys() == types.keys()
        and all(
            type(value[k]) is t or (t is float and type(value[k]) is int) for k, t in types.items()
        )
    )


def _check_depth(data: bytes) -> None:
    """Take innermost brackets away, level by level: what is deep or unbalanced leaves some."""
    brackets = _STRING.sub(b"", data).translate(_SQUARE, _NO_BRACKET)
    for _ in range(_MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise Malformed("nested too deeply, or cut")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same key twice")
    return found


def _int(digits: str) -> int:
    if len(digits) > INT_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits")
    return int(digits)


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number beyond every float")
    return number


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
