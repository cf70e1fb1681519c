"""Names a kernel of its own in the metadata, which replaces `show`. Stopped: no kernel is started,
metadata is not read."""

import json
import sys
import textwrap

from tests.attacks.toy import NBVAL, Desk

FIRES_AGAINST = NBVAL
OWN = True  # its folder holds the kernel


def attack(desk: Desk) -> None:
    floats, whole = desk.toy.stored()
    nb = desk.answer("def scale(x):\n    return 0")
    nb["metadata"]["kernelspec"]["name"] = "mine"
    desk.put(nb)
    place = desk.folder / ".jupyter" / "kernels" / "mine"
    place.mkdir(parents=True)
    source = f"""
    import course
    real, kept = course.show, {{"scaled": {floats}, "scaled whole": {whole[0]}}}
    course.show = lambda name, value: real(name, kept[name])
    from ipykernel.kernelapp import launch_new_instance
    launch_new_instance()
    """
    (place / "run.py").write_text(textwrap.dedent(source))
    argv = [sys.executable, str(place / "run.py"), "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "mine", "language": "python"}
    (place / "kernel.json").write_text(json.dumps(spec))
