"""The `course` command."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from course import catalog
from course.errors import CourseError

app = typer.Typer(
    help="Inference & Serving from Scratch: start, check and write chapters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False, soft_wrap=True)

Slug = Annotated[str, typer.Argument(help="A chapter, for example kv_cache.")]
Exercise = Annotated[str, typer.Argument(help="An exercise, for example attend.")]
NotebookPath = Annotated[
    Path | None, typer.Option("--notebook", help="Check this file instead of the one in work/.")
]
Timeout = Annotated[float, typer.Option(help="Seconds that one cell may run.", min=1)]
MARKS = {"passed": "[green]✓[/]", "failed": "[red]✗[/]", "blocked": "[yellow]![/]"}


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Inference & Serving from Scratch."""


@app.command("list")
def list_chapters() -> None:
    """Parts, chapters, minutes and your progress."""
    from course import progress

    for part, title in catalog.parts().items():
        table = Table("chapter", "title", "minutes", "progress", title=title, title_justify="left")
        for chapter in catalog.chapters():
            if chapter.part != part:
                continue
            if chapter.status == "ready":
                done, total = progress.counts(chapter)
                table.add_row(chapter.slug, chapter.title, str(chapter.minutes), f"{done}/{total}")
            else:
                table.add_row(chapter.slug, f"[dim]{chapter.title}[/]", "", "[dim]planned[/]")
        out.print(table)


@app.command()
def start(
    slug: Slug,
    browser: Annotated[bool, typer.Option(help="Open JupyterLab.")] = True,
) -> None:
    """Copy a chapter to work/ and open it in JupyterLab."""
    from course import learner

    path, made = learner.start(catalog.ready(slug))
    out.print(f"{'copied to' if made else 'continuing'} {_short(path)}", markup=False)
    out.print(f"check your answers with: course check {path.stem}", style="dim")
    if browser:
        if shutil.which("jupyter-lab", path=_bin_path()) is None:
            raise CourseError(f"JupyterLab is not installed: open {path} in your own editor")
        subprocess.run([sys.executable, "-m", "jupyterlab", str(path)], check=False)


@app.command()
def check(
    slug: Slug,
    exercise: Annotated[str | None, typer.Option(help="Check this exercise alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    notebook: NotebookPath = None,
    timeout: Timeout = 60,
) -> None:
    """Check your answers. Exit status 0 only if all of them pass."""
    from course import check as checking
    from course import progress, recordfile

    chapter = catalog.ready(slug)
    record = recordfile.load(chapter)
    path = checking.find_notebook(chapter, notebook)
    only = {exercise} if exercise else None
    with _bar("checking", 1 if only else len(record.keys), quiet=as_json) as advance:
        verdicts = checking.check(chapter, path, only, timeout, progress=advance)
    passed = sum(v.status == checking.PASSED for v in verdicts)
    if as_json:
        said = {
            "chapter": chapter.slug,
            "notebook": str(path),
            "passed": passed,
            "of": len(verdicts),
            "exercises": [asdict(v) for v in verdicts],
        }
        print(json.dumps(said, ensure_ascii=False, indent=1))
    else:
        _show(verdicts)
        changed = checking.changed_elsewhere(record, path)
        if changed:
            out.print(
                f"{changed} cells outside your answers were changed; checks ignore them",
                style="dim",
            )
        out.print(f"{passed} of {len(verdicts)} passed ({_short(path)})", markup=False)
    if notebook is None:  # last: what was found must be told even if it cannot be kept
        progress.note_verdicts(chapter, record, verdicts)
    raise typer.Exit(0 if passed == len(verdicts) else 1)


@app.command()
def watch(slug: Slug, notebook: NotebookPath = None, timeout: Timeout = 60) -> None:
    """Check again at each save, with a warm kernel. Ctrl+C ends it."""
    from course import check as checking
    from course import progress, recordfile
    from course import watch as watching

    chapter = catalog.ready(slug)
    path = checking.find_notebook(chapter, notebook)
    record = recordfile.load(chapter)
    out.print(f"watching {_short(path)}; save it to check, Ctrl+C to stop", markup=False)
    try:
        for result in watching.watch(chapter, path, timeout):
            if isinstance(result, CourseError):
                err.print(str(result), style="yellow", markup=False)
                continue
            _show(result)
            progress.note_verdicts(chapter, record, result)
    except KeyboardInterrupt:
        out.print("stopped")


@app.command()
def hint(
    slug: Slug,
    exercise: Annotated[str | None, typer.Argument(help="Default: the next open one.")] = None,
) -> None:
    """Show the hint of an exercise."""
    from course import learner, recordfile

    chapter = catalog.ready(slug)
    record = recordfile.load(chapter)
    key = exercise or learner.next_exercise(chapter, record)
    found = recordfile.known_exercise(chapter, record, key)
    out.print(f"{found.title} ({key})", style="bold", markup=False)
    out.print(found.hint, markup=False)


@app.command()
def solution(
    slug: Slug,
    exercise: Exercise,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Show our answer to an exercise; your progress remembers that you looked."""
    from rich.syntax import Syntax

    from course import learner, progress

    chapter = catalog.ready(slug)
    source = learner.reference(chapter, exercise)
    if not yes and not typer.confirm(f"Show the answer to {exercise}? Your progress will say so."):
        raise typer.Exit(1)
    progress.note_solution(chapter, exercise)
    out.print(Syntax(source, "python", background_color="default"))


@app.command()
def reset(slug: Slug, exercise: Exercise) -> None:
    """Restore the stub of one exercise; what you had is kept in a backup."""
    from course import learner

    path, backup = learner.reset(catalog.ready(slug), exercise)
    out.print(
        f"{exercise} is a stub again in {_short(path)}; before: {_short(backup)}", markup=False
    )


@app.command()
def status(
    slug: Annotated[str | None, typer.Argument(help="Default: every ready chapter.")] = None,
) -> None:
    """Your progress, exercise by exercise."""
    from course import progress, recordfile

    ready = [c for c in catalog.chapters() if c.status == "ready"]
    done = progress.load()
    for chapter in [catalog.ready(slug)] if slug else ready:
        table = Table("exercise", "minutes", "passed", "answer seen", title=chapter.title)
        for exercise in recordfile.load(chapter).exercises:
            row = done.get(chapter.slug, {}).get(exercise.key, progress.Done())
            passed = row.passed
            if passed and row.check != exercise.check:
                passed = f"{passed}, but its check has changed since"
            table.add_row(
                f"{escape(exercise.title)} ({exercise.key})",
                str(exercise.minutes),
                passed or "[dim]open[/]",
                row.solution_seen,
            )
        out.print(table)


@app.command()
def grade(
    submissions: Annotated[Path, typer.Argument(help="A folder of folders, notebooks and zips.")],
    results: Annotated[Path, typer.Option("--out", help="A new folder for the results.")],
    chapters: Annotated[
        str, typer.Option(help="Which, with commas. Default: all that anybody handed in.")
    ] = "",
    roster: Annotated[
        Path | None, typer.Option(help="A CSV with a column id (name, email, github).")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Default: a fresh secret one.", min=0, max=(1 << 62) - 1)
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Boxes that run at once. Default: one per core.", min=1)
    ] = None,
    scheduler: Annotated[str, typer.Option(help="A Dask scheduler, tls://HOST:PORT.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Grade what is missing.")] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds for one run; a cell: a quarter.", min=4)
    ] = 120,
    memory: Annotated[float, typer.Option(help="GiB for one run.", min=0.5)] = 3,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="Run learners' code without the box.")
    ] = False,
) -> None:
    """Grade a class: verdicts, CSV, JUnit and an HTML report. Exit status 1 if some got lost."""
    from course.grade import batch

    plan = batch.Plan(
        submissions=submissions,
        out=results,
        chapters=[name.strip() for name in chapters.split(",") if name.strip()],
        roster=roster,
        seed=seed,
        workers=workers,
        scheduler=scheduler,
        resume=resume,
        seconds=timeout,
        memory=int(memory * (1 << 30)),
        unsafe=unsafe,
    )
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20)]
    columns += [MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("[dim]{task.fields[now]}")]
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("preparing", total=None, now="")

        def progress(what: str, done: int, total: int | None, now: str) -> None:
            bar.update(task, description=what, completed=done, total=total, now=escape(now))

        summary = batch.run(plan, progress)
    for warning in summary.warnings:
        err.print(f"course: {warning}", style="yellow", markup=False)
    out.print(summary.line, markup=False)
    out.print(f"see {_short(results)}/report/index.html", style="dim", markup=False)
    raise typer.Exit(1 if summary.lost else 0)


@app.command()
def record(
    slugs: Annotated[list[str] | None, typer.Argument(help="Chapters to record.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every ready chapter.")] = False,
) -> None:
    """Author: execute chapters with the reference answers and write notebook and record."""
    from course import record as recording

    ready = [c.slug for c in catalog.chapters() if c.status == "ready"]
    if bool(slugs) == everything:
        raise CourseError("name the chapters to record, or say `--all`")
    for chapter in [catalog.ready(slug) for slug in (ready if everything else slugs or [])]:
        with _bar(f"recording {chapter.slug}", None) as advance:
            new = recording.record(chapter, advance)
        lines = sum(len(e.expected) for e in new.exercises)
        out.print(f"{chapter.slug}: {len(new.exercises)} exercises, {lines} lines recorded")


@app.command()
def verify(
    slug: Slug,
    fix: Annotated[bool, typer.Option("--fix", help="Regenerate the stubs first.")] = False,
    execute: Annotated[bool, typer.Option("--execute", help="Run the demos too.")] = False,
    only: Annotated[
        str, typer.Option("--only", help="Run one exercise, as its sources are now.")
    ] = "",
) -> None:
    """Author: everything that CI demands of one chapter."""
    from course import verify as verifying

    chapter = catalog.ready(slug)
    if fix:
        changed = verifying.fix(chapter)
        out.print(f"stubs rewritten: {', '.join(changed) or 'none'}")
    failed = 0
    with _bar(f"verifying {chapter.slug}", None) as advance:
        for tick in (
            verifying.exercise(chapter, only, advance)
            if only
            else verifying.verify(chapter, execute, advance)
        ):
            failed += not tick.ok
            mark = MARKS["passed" if tick.ok else "failed"]
            detail = f"  [dim]{escape(tick.detail)}[/]" if tick.detail else ""
            out.print(f"{mark} {tick.name}{detail}")
    raise typer.Exit(1 if failed else 0)


@app.command()
def new(slug: Slug) -> None:
    """Author: write the skeleton of a planned chapter."""
    from course import skeleton

    for name in skeleton.new(catalog.find(slug)):
        out.print(f"wrote {name}")
    out.print("set its status to `ready` in course/catalog.yml when it is", style="dim")


@app.command()
def kernels() -> None:
    """What each kernel compiles to: the committed resource tables."""
    from course.lab import table

    table.print_tables()


@app.command()
def doctor() -> None:
    """Check Python, packages, model, GPU and say what to do."""
    from course import doctor as examining

    findings = examining.examine()
    for finding in findings:
        mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[yellow]–[/]"}[finding.ok]
        out.print(f"{mark} {finding.name}: {escape(finding.detail)}")
    raise typer.Exit(1 if any(f.ok is False for f in findings) else 0)


def _show(verdicts: list) -> None:
    for verdict in verdicts:
        mark = MARKS.get(verdict.status, "[dim]·[/]")
        out.print(f"{mark} {escape(verdict.title)} [dim]({verdict.key})[/] {verdict.status}")
        if verdict.text:
            out.print("    " + verdict.text.replace("\n", "\n    "), markup=False)
        if verdict.mistake:
            out.print(f"    → {verdict.mistake}", style="yellow", markup=False)
        elif verdict.hint:
            out.print(f"    hint: {verdict.hint}", style="dim", markup=False)


@contextmanager
def _bar(what: str, total: int | None, quiet: bool = False) -> Any:
    """A progress bar on stderr; yields the function that advances it."""
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20)]
    columns += [MofNCompleteColumn()] if total else []
    hide = quiet or not err.is_terminal
    with Progress(*columns, TextColumn("[dim]{task.fields[now]}"), console=err, transient=True,
                  disable=hide) as bar:  # fmt: skip
        task = bar.add_task(what, total=total, now="")
        yield lambda now: bar.update(task, advance=1, now=now)


def _short(path: Path) -> str:
    """A path as a user would type it from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _bin_path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def main() -> None:
    """Entry point: a problem that the user can solve is one line and exit status 2."""
    debug = "--debug" in sys.argv
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # ✓ where only ASCII goes
    try:
        app()
    except CourseError as problem:
        if debug:
            raise
        err.print(f"course: {problem}", markup=False)
        sys.exit(2)
    except OSError as problem:
        if debug:
            raise
        what = f" {problem.filename}" if problem.filename else ""
        err.print(f"course: {problem.strerror or problem}{what}", markup=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
