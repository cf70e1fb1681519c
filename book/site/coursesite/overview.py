"""The course at a glance: the route through its chapters, and how well its checks are tested."""

from html import escape

from course import catalog, mutants, recordfile
from course.catalog import Chapter


def route() -> str:
    """A picture of the course in HTML: a row for each part, a bar as wide as each chapter is long.

    A screen reader hears it as a list; the bars of ready chapters are links.
    """
    rows = {
        part: [chapter for chapter in catalog.chapters() if chapter.part == part]
        for part in catalog.parts()
    }
    longest = max(sum(chapter.minutes for chapter in row) for row in rows.values())
    shown = ['<ol class="route">']
    for part, title in catalog.parts().items():
        name, _, about = title.partition(": ")
        minutes = sum(chapter.minutes for chapter in rows[part])
        ready = sum(chapter.status == "ready" for chapter in rows[part])
        about = f' <span class="about">{about[0].upper()}{about[1:]}</span>' if about else ""
        shown += [
            f'<li><p><a href="parts/{part}.html">{name}</a>{about}',
            f'<span class="count">{len(rows[part])} chapters, {ready or "none"} ready · '
            f"{hours(minutes)}</span></p>",
            f'<ol class="bars" style="width: {100 * minutes / longest:.1f}%">',
            *map(bar, rows[part]),
            "</ol></li>",
        ]
    shown += [
        "</ol>",
        '<p class="legend"><span class="ready"></span> ready <span class="planned"></span> '
        "planned. A bar is as wide as its chapter takes minutes to solve.</p>",
    ]
    return "\n".join(shown)


def bar(chapter: Chapter) -> str:
    """One chapter of the picture."""
    name = f"{escape(chapter.title)}, {chapter.minutes} minutes"
    ready = chapter.status == "ready"
    text = f'<span class="visually-hidden">{name}{"" if ready else ", planned"}</span>'
    if ready:
        page = f"../notebooks/{chapter.part}/{chapter.slug}.html"
        text = f'<a href="{page}" title="{name}">{text}</a>'
    grow = f'style="flex-grow: {chapter.minutes}"'
    return f'<li class="{chapter.status}" title="{name}" {grow}>{text}</li>'


def hours(minutes: int) -> str:
    """`437` -> `about 7 h`: planned chapters are estimates, so nothing finer is honest."""
    return f"about {round(minutes / 60)} h"


def quality() -> str:
    """For each ready chapter a table of its exercises and the wrong answers to them."""
    shown = []
    for chapter in catalog.chapters():
        if chapter.status == "ready":
            shown.append(f"## {chapter.title}")
            shown.append(
                f"[The chapter](/notebooks/{chapter.part}/{chapter.slug}.ipynb), "
                f"[the wrong answers]({catalog.repository()}/blob/main/"
                f"{chapter.mutants.relative_to(catalog.ROOT).as_posix()})."
            )
            shown.append(_table(chapter))
    return "\n\n".join(shown)


def _table(chapter: Chapter) -> str:
    record, loaded = recordfile.load(chapter), mutants.module(chapter)
    rows = []
    for exercise in record.exercises:
        key = exercise.key
        rows.append(
            (
                len(loaded.MUTANTS.get(key, [])),
                len(loaded.SHORTCUTS.get(key, [])),
                exercise.automatic,
                len(loaded.EQUIVALENT.get(key, {})),
            )
        )
    total = [sum(column) for column in zip(*rows, strict=True)]
    names = [f"`{exercise.key}`" for exercise in record.exercises]
    body = [_line(name, row) for name, row in zip(names, rows, strict=True)]
    head = "| exercise | mistakes | shortcuts | by machine | alike |"
    return "\n".join([head, "|---|--:|--:|--:|--:|", *body, _line("all", total)])


def _line(name: str, numbers: list[int] | tuple[int, ...]) -> str:
    return f"| {name} | {' | '.join(str(number) for number in numbers)} |"
