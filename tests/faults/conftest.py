"""Options and fixtures of the drills."""

import pytest

_SEEDS = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=_SEEDS, help="how many seeded instants each kill is tried at")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds", default=_SEEDS)))
