"""The command line as a person has it: a process, its exit code, and what it printed where."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from embedded.tied import tie
from tests.commands.warm import Warm

ROOT = Path(__file__).resolve().parents[2]
STARTER = ROOT / "starter.py"
_OURS = ("TEMPORAL_", "SAISEI_", "REDIS_URL", "DATABASE_URL")
_LONGEST = 120  # seconds; only what hangs takes so long
_warm = cache(Warm)


@dataclass(frozen=True)
class CliResult:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """All of stdout as one JSON document."""
        return json.loads(self.stdout)

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()

    def refused(self, *words: str, code: int = 1) -> None:
        """It ended with one sentence that holds these words, and printed no result."""
        assert (self.exit_code, self.stdout) == (code, ""), self
        assert len(self.stderr.splitlines()) == 1, self.stderr
        assert self.stderr.startswith("starter.py"), self.stderr
        for word in words:
            assert word in self.stderr


@dataclass(frozen=True)
class Cli:
    """Runs commands on one home."""

    home: Path

    def __call__(self, *arguments: str, env: Mapping[str, str] | None = None) -> CliResult:
        """From a warm process, unless the command leaves processes behind or Python itself is set otherwise."""
        if arguments[:1] not in (("up",), ("down",)) and all(name.startswith(_OURS) for name in env or {}):
            done = _warm().run(arguments, self.environment(env), _LONGEST)
        else:
            done = self._cold(arguments, env)
        return CliResult(done.returncode, done.stdout, done.stderr)

    def _cold(self, arguments: tuple[str, ...], env: Mapping[str, str] | None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, str(STARTER), *arguments],
            capture_output=True,
            text=True,
            timeout=_LONGEST,
            env=self.environment(env),
            cwd=ROOT,
        )

    def json(self, *arguments: str, env: Mapping[str, str] | None = None) -> Any:
        """The document of a command that succeeds."""
        result = self(*arguments, "--json", env=env)
        assert result.exit_code == 0, result
        return result.json

    def start(self, *arguments: str, env: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
        """A command that goes on while the test does something else."""
        return tie(
            subprocess.Popen(
                [sys.executable, str(STARTER), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=self.environment(env),
                cwd=ROOT,
            )
        )

    def environment(self, more: Mapping[str, str] | None) -> dict[str, str]:
        """This process's own, without what points to other servers."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        return env | {"SAISEI_HOME": str(self.home), "TEMPORAL_CONFIG_FILE": os.devnull} | dict(more or {})


def ended(process: "subprocess.Popen[str]", interrupt: bool = False) -> CliResult:
    """Wait for a command that `start` started; `interrupt` as Ctrl-C does."""
    if interrupt:
        process.send_signal(signal.SIGINT)
    try:
        stdout, stderr = process.communicate(timeout=_LONGEST)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return CliResult(process.returncode, stdout, stderr)
