"""Instruments for Triton kernels that work without a GPU.

They take kernels as arguments: run them on CPU tensors (`interpreted`), watch their memory
(`metered`, `guarded`, `poisoned`), hold an answer to the rules (`check_jit`), compile them ahead
of time (`aot`, `table`) and break them on purpose (`mutate`). Triton is imported on first use.
"""

import importlib
from typing import Any

_HOMES = {
    "KernelError": "errors",
    "check_guard": "memory",
    "check_jit": "jit_rules",
    "guarded": "memory",
    "interpreted": "interp",
    "metered": "meter",
    "poisoned": "memory",
    "poisoning": "memory",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "triton":
            raise
        from course.errors import CourseError

        raise CourseError("kernels need Triton, which runs on Linux: pip install triton") from None
