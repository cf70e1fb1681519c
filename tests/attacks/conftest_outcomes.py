"""Brings a conftest.py that reports every test as passed. Stopped: no pytest, no learner's file."""

from tests.attacks.toy import NBVAL, Desk

FIRES_AGAINST = NBVAL
HOOK = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome, report.longrepr = "passed", None
"""


def attack(desk: Desk) -> None:
    desk.edited()
    (desk.folder / "work" / "conftest.py").write_text(HOOK)
