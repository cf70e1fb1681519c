"""What one `show` line carries, and when two of them agree."""

import hashlib
import math
from typing import Any

MAX_FLOATS = 64
MAX_INTS = 64
MAX_ENTRIES = 1000
MAX_TEXT = 2000
DIGITS = 7


def tokens(name: str, value: Any) -> list[int | float | str]:
    """Flatten `value` into the numbers and words that are displayed and compared.

    A tensor or array contributes its shape as a word (`2x3`) before its entries, in row-major
    order; more than 64 integers become one digest. Floats keep seven significant digits.

    Raises TypeError for booleans and unknown types, ValueError for more than 64 floats, 1,000
    entries of several kinds or 2,000 characters.
    """
    if hasattr(value, "detach"):  # a tensor; torch itself need not be imported here
        value = value.detach().cpu()
        floating = value.is_floating_point()
        value = (value.double() if floating else value).numpy()
    if hasattr(value, "dtype") and hasattr(value, "reshape"):
        return _array(name, value)
    if isinstance(value, (list, tuple)):
        flat = [token for entry in value for token in tokens(name, entry)]
        if sum(isinstance(token, float) for token in flat) > MAX_FLOATS:
            raise ValueError(f"show({name!r}): more than {MAX_FLOATS} floats; pick some entries")
        whole = [token for token in flat if isinstance(token, int)]
        if len(whole) == len(flat) > MAX_INTS:
            return [len(whole), _digest(whole)]
        if len(flat) > MAX_ENTRIES:
            raise ValueError(f"show({name!r}): {len(flat):,} entries; at most {MAX_ENTRIES:,}")
        _limit_text(name, flat)
        return flat
    if isinstance(value, bool):
        raise TypeError(f"show({name!r}): show the values, not whether they agree")
    if isinstance(value, (int, str)):
        _limit_text(name, [value])
        return [value]
    if isinstance(value, float):
        return [_rounded(value)]
    raise TypeError(f"show({name!r}): cannot show a {type(value).__name__}")


def _array(name: str, value: Any) -> list[int | float | str]:
    if value.dtype.kind == "b":
        raise TypeError(f"show({name!r}): show the values, not whether they agree")
    shape: list[int | float | str] = ["x".join(str(n) for n in value.shape)] if value.ndim else []
    flat = value.reshape(-1).tolist()
    if value.dtype.kind in "iu":
        return shape + ([_digest(flat)] if len(flat) > MAX_INTS else flat)
    if len(flat) > MAX_FLOATS:
        raise ValueError(f"show({name!r}): {len(flat)} floats; pick at most {MAX_FLOATS} of them")
    return shape + [_rounded(x) for x in flat]


def _limit_text(name: str, flat: list[int | float | str]) -> None:
    length = sum(len(token) for token in flat if isinstance(token, str))
    if length > MAX_TEXT:
        raise ValueError(f"show({name!r}): {length:,} characters; at most {MAX_TEXT:,}")


def _digest(flat: list[int]) -> str:
    return hashlib.sha256(",".join(map(str, flat)).encode()).hexdigest()[:12]


def _rounded(x: float) -> float | str:
    """Seven significant digits; nan and infinities as words, which JSON can carry."""
    return float(f"{x:.{DIGITS}g}") if math.isfinite(x) else str(x)


def line(name: str, values: list) -> str:
    """The text a reader sees: the name, then its values; a float never looks like an integer."""
    return f"{name}: {' '.join(map(_word, values))}"


def _word(value: int | float | str) -> str:
    text = f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)
    return f"{text}.0" if isinstance(value, float) and text.lstrip("-").isdigit() else text


def agree(expected: list, got: list, tol: float) -> bool:
    """Integers and words exactly, floats within `tol * max(1, |expected|)`.

    The expected token decides: where it is an integer, a float never agrees.
    """
    return len(expected) == len(got) and all(
        _agree(e, g, tol) for e, g in zip(expected, got, strict=True)
    )


def _agree(expected: int | float | str, got: int | float | str, tol: float) -> bool:
    if isinstance(expected, float) and isinstance(got, (int, float)):
        try:
            return abs(got - expected) <= tol * max(1.0, abs(expected))
        except OverflowError:  # an integer beyond every float
            return False
    return type(expected) is type(got) and expected == got


def bits(values: list, tol: float) -> float:
    """How much a shown line tells, in bits: what a blind guess would have to hit."""
    floats = sum(isinstance(v, float) for v in values)
    words = sum(isinstance(v, str) for v in values)
    whole = sum(v.bit_length() for v in values if isinstance(v, int))
    return floats * math.log2(1 / tol) + 4 * words + whole
