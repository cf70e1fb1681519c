"""Load our nbval plugin for every pytest run in the checkout; in CI let no skip pass for a test."""

import os

import pytest

pytest_plugins = ["course.nbval_plugin"]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = (yield).get_result()
    if report.skipped and os.environ.get("COURSE_NO_SKIPS") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped: {report.longrepr}"
