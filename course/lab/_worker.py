"""Compiles kernels to Triton IR in a process that the learner's code never touches.

Run as a script; reads one JSON request a line and writes one JSON reply a line. It imports Triton
and nothing else, so a kernel that leans on torch, NumPy or an earlier answer does not compile.
"""

import importlib.util
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.compiler.compiler import make_backend

TARGET = GPUTarget("cuda", 90, 32)
counter = itertools.count()


def constant(value: object) -> object:
    """JSON has no dtypes: {"dtype": "fp16"} stands for tl.float16."""
    return tl.str_to_ty(value["dtype"], None) if isinstance(value, dict) else value


def compile_to_ttir(request: dict, folder: Path) -> str:
    """The Triton IR of function `name` in `source`, inlined and simplified."""
    module_name = f"submission_{next(counter)}"
    path = folder / f"{module_name}.py"
    path.write_text(request["source"])
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    for name, value in request["globals"].items():
        setattr(module, name, tl.constexpr(constant(value)))
    spec.loader.exec_module(module)

    constants = {name: constant(value) for name, value in request["constexprs"].items()}
    source = ASTSource(getattr(module, request["name"]), request["signature"], constants)
    backend = make_backend(TARGET)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict = {}
    backend.add_stages(stages, options, source.language)
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    raw = source.make_ir(TARGET, options, codegen, modules, context)
    return str(stages["ttir"](raw, {}))


def explain(error: BaseException) -> dict:
    """The innermost message, with the text of its line if the compiler knows it."""
    line = ""
    while True:
        if isinstance(error, CompilationError) and hasattr(error.node, "lineno"):
            line = error.src.splitlines()[error.node.lineno - 1].strip()
        if error.__cause__ is None:
            break
        error = error.__cause__
    message = getattr(error, "error_message", None) or str(error) or type(error).__name__
    return {"error": message, "line": line}


def main() -> None:
    # Whatever Triton prints goes to stderr; the pipe carries replies alone.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            try:
                reply = {"ttir": compile_to_ttir(json.loads(line), Path(folder))}
            except Exception as error:
                reply = explain(error)
            print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
