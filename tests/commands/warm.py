"""A process that has imported the command line, and forks for each command: `python -m tests.commands.warm SOCKET`.

What a person waits for once is most of a second of imports; hundreds of commands would spend minutes of a processor's
time on them. The fork is given standard streams, an environment and arguments, and runs what `starter.py` runs, to its
own exit. Commands may run side by side. The warm process ends when its standard input closes.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]


class Warm:
    """Runs commands through one warm process, which ends with this one."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")  # short: a socket's path has about 100 characters
        self._path = f"{self._folder.name}/socket"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.commands.warm", self._path],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches pytest alone, which then closes the pipe
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError("the warm process did not start; its message is above")
        atexit.register(self.close)

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], timeout: float
    ) -> "subprocess.CompletedProcess[str]":
        """As `subprocess.run` of `starter.py` with its output captured.

        Raises:
            subprocess.TimeoutExpired: it took longer, and was killed.
        """
        with (
            tempfile.TemporaryFile() as stdout,
            tempfile.TemporaryFile() as stderr,
            socket.socket(socket.AF_UNIX) as link,
        ):
            link.connect(self._path)
            socket.send_fds(link, [b"."], [stdout.fileno(), stderr.fileno()])
            link.sendall(json.dumps([list(arguments), dict(environment)]).encode() + b"\n")
            link.settimeout(timeout)
            with link.makefile("r") as answers:
                pid = int(answers.readline())
                try:
                    code = int(answers.readline())
                except TimeoutError:
                    os.kill(pid, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(list(arguments), timeout) from None
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess(list(arguments), code, stdout.read().decode(), stderr.read().decode())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._folder.cleanup()


def _serve(path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([sys.stdin, listener], [], [])
            if sys.stdin in ready:
                return
            link, _ = listener.accept()
            if os.fork() == 0:
                _answer(listener, link)
            link.close()


def _answer(listener: socket.socket, link: socket.socket) -> NoReturn:
    """In a fork: run the command in another one, and tell its pid and how it ended."""
    try:
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, streams, _, _ = socket.recv_fds(link, 1, 2)
        with link.makefile("r") as requests:
            arguments, environment = json.loads(requests.readline())
        pid = os.fork()
        if pid == 0:
            link.close()
            _run(streams, arguments, environment)
        link.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        link.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    finally:
        os._exit(0)


def _run(streams: list[int], arguments: list[str], environment: dict[str, str]) -> NoReturn:
    code: Any = 1
    try:
        for number, descriptor in enumerate([os.open(os.devnull, os.O_RDONLY), *streams]):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[:] = [str(ROOT / "starter.py"), *arguments]
        starter.program()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import starter

    starter.parser()  # imports all
    _serve(sys.argv[1])
