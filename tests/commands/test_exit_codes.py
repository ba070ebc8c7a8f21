"""What README says of exit codes, tried: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted."""

import os
import re
import socket
import subprocess
import sys

import pytest

from tests.commands.cli import ROOT, STARTER, Cli
from tests.commands.conftest import Inside

SAMPLES = {
    0: [
        (["init"], {}),
        (["intake", "pause"], {}),
        (["intake", "pause"], {}),
        (["status"], {"TEMPORAL_ADDRESS": "127.0.0.1:1"}),
        (["audit"], {}),
        (["--help"], {}),
    ],
    1: [
        (["orders", "show", "nobody"], {}),
        (["queues"], {"REDIS_URL": "redis://127.0.0.1:1"}),
        (["orders", "place"], {}),  # intake is paused
        (["receivers", "end", "mail", "--reason", "x"], {}),
    ],
    2: [
        ([], {}),
        (["nothing-of-ours"], {}),
        (["orders", "place", "--count", "0"], {}),
        (["orders", "place", "--sku", "tea"], {}),
        (["event", "duplicate", "--times", "3"], {}),
        (["status"], {"REDIS_URL": "nonsense"}),
        (["status"], {"SAISEI_IDLE": "soon"}),
    ],
}


def test_each_code_is_what_the_table_says(nothing: Cli, inside: Inside) -> None:
    table = dict(re.findall(r"^\| ([0-9]+) \| ([^|]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {int(code) for code in table} == {*SAMPLES, 130}  # 130: test_up.py, where Ctrl-C ends a start
    for code, samples in SAMPLES.items():
        for arguments, env in samples:
            result = inside(nothing, *arguments, env=env)
            assert result.exit_code == code, (arguments, result)
            if code:
                assert (result.stdout, len(result.stderr.splitlines())) == ("", 1), (arguments, result)


def test_the_commands_that_the_table_names_end_with_its_code(nothing: Cli, inside: Inside) -> None:
    rows = re.findall(r"^\| ([12]) \| [^|]+ \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    named = [(int(code), each) for code, cell in rows for each in re.findall(r"`(orders [^`]+)`", cell)]
    assert inside(nothing, "init").exit_code == 0
    assert [code for code, _ in named] == [1, 1, 2]
    for code, command in named:
        assert inside(nothing, *command.split()).exit_code == code, command


@pytest.mark.parametrize("program", ["worker.py", "api.py"])
@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--fast", 2), ("now", 2)])
def test_worker_and_api_take_no_arguments(nothing: Cli, program: str, argument: str, code: int) -> None:
    """They start nothing then."""
    done = subprocess.run(
        [sys.executable, program, argument],
        cwd=ROOT,
        env=nothing.environment({"REDIS_URL": "redis://127.0.0.1:1", "SAISEI_API_PORT": "0"}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (code, int(code > 0)), done
    assert done.stdout.startswith(f"usage: {program}") is (code == 0)


@pytest.mark.parametrize("program", ["worker.py", "api.py"])
@pytest.mark.parametrize("code", [1, 2])
def test_worker_and_api_end_with_the_same_codes(nothing: Cli, program: str, code: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = {"SAISEI_API_PORT": str(taken.getsockname()[1])} | ({"SAISEI_IDLE": "soon"} if code == 2 else {})
        done = subprocess.run(
            [sys.executable, program],
            cwd=ROOT,
            env=nothing.environment(env),
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1), done


@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["links"], ["up"]])
def test_a_reader_that_leaves_changes_no_exit_code(cli: Cli, arguments: list[str]) -> None:
    """As in `starter.py up | head -1`: the work is done, and nothing is said about the pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, str(STARTER), *arguments],
        cwd=ROOT,
        env=cli.environment(None),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "it is up already\n" if arguments == ["up"] else "")


def test_an_event_is_duplicated_by_the_name_of_its_order(nothing: Cli, inside: Inside) -> None:
    refused = inside(nothing, "event", "duplicate", "--times", "3")
    refused.refused("--order", "see starter.py event duplicate --help", code=2)
    shown = inside(nothing, "event", "duplicate", "--help").stdout
    assert "starter.py event duplicate --order 1 --times 3" in shown
    assert "an order's number or id, or its event's id" in " ".join(shown.split())


HEAVY = {"httpx", "redis", "rich", "sqlalchemy", "temporalio", "temporalio.client", "worker"}


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [
        (["--help"], set()),
        (["nothing-of-ours"], set()),
        (["links"], {"rich", "sqlalchemy", "temporalio"}),
        (["status"], HEAVY - {"httpx", "worker"}),
    ],
)
def test_a_command_imports_what_it_needs_and_no_more(cli: Cli, arguments: list[str], imported: set[str]) -> None:
    program = (
        "import config, sys, starter\n"
        "try:\n    starter.main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        f"print(*(name for name in {sorted(HEAVY)} if name in sys.modules), file=sys.stderr)\n"
        "config.end(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=cli.environment(None),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert set(done.stderr.splitlines()[-1].split()) == imported
