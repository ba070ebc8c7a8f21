"""What all tests share: the servers, the databases, and which tests stay together in one of the parallel processes.

Each process (`pytest -n auto`) starts at most one PostgreSQL, one Temporal and one Valkey for the tests that can share
them, on ports and in folders of its own. A test goes to whichever process is free, so tests that share something
dearer (a module's stack, the stack of the commands) are kept in one group, lest every process start it.
"""

import os
from collections import Counter

import pytest

# Fixtures, the same ones for all tests: imported into several conftests they would be started once for each.
pytest_plugins = ["tests.databases", "tests.servers"]

_MOST_PROCESSES = 4


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, since a test waits for servers much of its time; each has servers of its own."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    return min(cores + 1, _MOST_PROCESSES)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = _group(item)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))


def _group(item: pytest.Item) -> str | None:
    """The fixture of a module or a package that a test shares with others, or the stack of the commands."""
    known = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    if "stack" in known and known["stack"][-1].scope == "session":
        return "commands"
    for name, definitions in known.items():
        if definitions[-1].scope in ("module", "package"):
            # Each value of a parametrized fixture is one of its own.
            values = getattr(item, "callspec", None)
            value = values.params.get(name, "") if values is not None else ""
            return f"{definitions[-1].baseid}:{value}"
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Each reason for a skip, with how many tests it took; whatever the flags, none is passed over in silence."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2] if isinstance(report.longrepr, tuple) else "" for report in skipped)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} not run: {reason.removeprefix('Skipped: ')}")
