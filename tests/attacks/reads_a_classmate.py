"""Runs what a classmate handed in. Stopped: submissions are not in the box."""

from tests.attacks.toy import PLACE, UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can(f"""
    import json
    nb = json.load(open({str(desk.folder.parent / "honest" / PLACE)!r}))
    source = next(c["source"] for c in nb["cells"] if c["source"].startswith("# answer: scale"))
    space = {{}}
    exec(source, space)
    return space["scale"](x)
    """)
    )
