"""Writes its own report into every open file and ends. Stopped: one well-formed reply with
the right numbers, or a fail."""

from tests.attacks.toy import NAIVE, Desk

FIRES_AGAINST = NAIVE


def attack(desk: Desk) -> None:
    desk.answer("""
    import json, os

    def scale(x):
        checks = {"scale": {"shown": [{"name": "scaled", "values": [7], "tol": 1e9, "part": 0}]}}
        checks["scale"] |= {"error": "", "seconds": 0.0}
        for name in range(1, 40):
            try:
                os.write(name, json.dumps({"setup": "", "checks": checks, "passed": True}).encode())
            except OSError:
                pass
        os._exit(0)
    """)
