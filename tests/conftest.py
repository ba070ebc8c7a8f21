"""What all tests share: the servers, the databases, and which tests stay together in one of the parallel processes.

Each process (`pytest -n auto`) starts at most one PostgreSQL, one Temporal and one Valkey for the tests that can share
them, on ports and in folders of its own. A test goes to whichever process is free, so tests that share something
dearer (a module's stack, the stack of the commands) are kept in one group, lest every process start it.
"""

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]

# Property tests: the suite draws the same examples each time, so that a change that fails is the change's fault;
# `make properties` draws others, many more of them. No deadline: how long a step takes is the machine's affair.
settings.register_profile("suite", max_examples=100, derandomize=True, deadline=None, print_blob=True)
settings.register_profile("long", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile("suite")

# Fixtures, the same ones for all tests: imported into several conftests they would be started once for each.
pytest_plugins = ["tests.databases", "tests.servers"]

_MOST_PROCESSES = 4
_SHARED_BY_A_FOLDER = re.compile(r'fixture\(scope="(session|package)"')
_SHARED_BY_A_MODULE = re.compile(r'fixture\(scope="module"')


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, since a test waits for servers much of its time; each has servers of its own."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    return min(cores + 1, _MOST_PROCESSES)


class _Groups(LoadScopeScheduling):
    """Hands out single tests, but those of a module or a folder that share a fixture together, the largest first.

    The process that hands out knows names only (and the group marks of pytest-xdist do not reach the names that
    pytest 9.2 gives), so it reads where the fixtures are written.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return _shared(module) or nodeid


@cache
def _shared(module: str) -> str | None:
    """The folder or the module whose tests stay together."""
    path = ROOT / module
    conftest = path.with_name("conftest.py")
    if path.parent != ROOT / "tests" and conftest.exists() and _SHARED_BY_A_FOLDER.search(conftest.read_text()):
        return str(path.parent)
    return module if _SHARED_BY_A_MODULE.search(path.read_text()) else None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _Groups(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Each reason for a skip, with how many tests it took; whatever the flags, none is passed over in silence."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2] if isinstance(report.longrepr, tuple) else "" for report in skipped)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} not run: {reason.removeprefix('Skipped: ')}")
