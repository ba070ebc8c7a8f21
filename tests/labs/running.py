"""Commands as a person runs them: `starter.py` in a process of its own, with its home and temporary folder given."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from embedded.tied import tie
from tests.embedded.processes import ROOT, processes_of
from tests.waiting import wait_until

CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("TEMPORAL_", "SAISEI_")) and name not in ("REDIS_URL", "DATABASE_URL")
}


@dataclass
class Running:
    """A command under way, everything of it below `folder`."""

    process: subprocess.Popen[str]
    folder: Path

    def finish(self, code: int = 0) -> tuple[str, str]:
        """(stdout, stderr) once it ended with `code`."""
        out, err = self.process.communicate(timeout=120)
        assert self.process.returncode == code, err
        assert "Traceback" not in err
        return out, err

    def nothing_left(self) -> None:
        """No process and no scratch folder."""
        wait_until(lambda: not processes_of(self.folder), 60, f"no process below {self.folder}")
        wait_until(lambda: not list((self.folder / "tmp").iterdir()), 60, "no scratch folder is left")


def start(folder: Path, *arguments: str, **env: str) -> Running:
    """Start `starter.py` with these arguments; its home is `folder/home`."""
    return start_program(folder, str(ROOT / "starter.py"), *arguments, **env)


def start_program(folder: Path, *arguments: str, **env: str) -> Running:
    """Start Python with these arguments, likewise."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={
            **CLEAN,
            "SAISEI_HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": str(ROOT),
            **env,
        },
    )
    return Running(tie(process), folder)
