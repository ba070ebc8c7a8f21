"""Options of the drills: `pytest tests/faults --seeds N --long`, as `make drill` runs them."""

import pytest

_SEEDS = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=_SEEDS, help="how many seeded instants each kill is tried at")
    parser.addoption("--long", action="store_true", help="also the drills that `make test` has no time for")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: a drill that `make test` leaves to `make drill`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long", default=False):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds", default=_SEEDS)))
