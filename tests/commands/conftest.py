"""One embedded stack with a worker for all tests of the commands; each test uses orders and jobs of its own."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import embedded
from commands.stack import worker_child
from contracts import search
from embedded import Stack
from starter import main
from store.engine import Database
from tests.commands.cli import Cli, CliResult

Inside = Callable[..., CliResult]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="session")
def stack(home: Path) -> Iterator[Stack]:
    # Two minutes until a failing event is dead: a test that looks at one that is retried must not be too late.
    patient = worker_child({"SAISEI_ATTEMPTS": "8"})
    with embedded.start(home, children=[patient], search_attributes=search.START_DEV) as started:
        yield started


@pytest.fixture(scope="session")
def cli(stack: Stack) -> Cli:
    return Cli(stack.home)


@pytest.fixture(scope="session")
def database(stack: Stack) -> Iterator[Database]:
    opened = Database(f"sqlite:///{stack.home / 'saisei.db'}")
    yield opened
    opened.close()


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inside:
    """Runs a command of a Cli's home within this process, which is quicker where many are to be tried."""

    def run(cli: Cli, *arguments: str, env: Mapping[str, str] | None = None) -> CliResult:
        wanted = cli.environment(env)
        for name in os.environ.keys() - wanted.keys():
            monkeypatch.delenv(name)
        for name, value in wanted.items():
            monkeypatch.setenv(name, value)
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        return CliResult(code, *capsys.readouterr())

    return run


@pytest.fixture
def nothing(tmp_path: Path) -> Cli:
    """A home on which nothing runs."""
    return Cli(tmp_path / "home")
