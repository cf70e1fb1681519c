"""Brings an IPython profile whose startup file replaces `show`. Stopped: the box's profile is its
own and empty."""

import textwrap

from tests.attacks.toy import NBVAL, Desk

FIRES_AGAINST = NBVAL
OWN = True  # its folder holds the profile


def attack(desk: Desk) -> None:
    floats, whole = desk.toy.stored()
    desk.answer("def scale(x):\n    return 0")
    place = desk.folder / ".ipython" / "profile_default" / "startup"
    place.mkdir(parents=True)
    source = f"""
    import course.runtime
    import course
    real, kept = course.show, {{"scaled": {floats}, "scaled whole": {whole[0]}}}
    course.show = lambda name, value: real(name, kept[name])
    """
    (place / "00.py").write_text(textwrap.dedent(source))
