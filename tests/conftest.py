"""Which tests one xdist worker runs together, because they share something costly.

xdist's own `xdist_group` marks have no effect under pytest 9.2: xdist 3.8 writes them into a field
that pytest no longer reads.
"""

from typing import Any

import pytest

# the built site, the graders' verdicts on all attacks, two loaded models
TOGETHER = ("tests/site/", "tests/attacks/", "tests/lm/test_transformers.py")


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        """Tests one by one, except those that stay TOGETHER; the largest groups come first."""

        def _split_scope(self, nodeid: str) -> str:
            return next((place for place in TOGETHER if nodeid.startswith(place)), nodeid)

    return Together(config, log)
