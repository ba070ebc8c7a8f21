"""Settings from the environment: where the data lives and how long things wait. Durations are seconds.

Temporal's own address, namespace, TLS and API key come from its environment or profile (temporalio.envconfig).
How a program begins (its arguments) and ends stands here too, for all of them have it in common.
"""

import argparse
import contextlib
import difflib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from contracts.errors import WrongSettings
from contracts.messages import Timings

_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True)
class Settings:
    """Everything that a process of Saisei may be told from outside.

    Each duration below may be set by `SAISEI_` and its name in capitals, e.g. `SAISEI_IDLE=2`.
    """

    home: Path
    database_url: str
    redis_url: str | None
    ui_url: str | None = None  # base of links into the Temporal Web UI, from TEMPORAL_UI_URL
    # The pipeline.
    idle: float = 1.0  # a drain that moved nothing for this long goes to rest
    drain: float = 60.0  # a drain returns after this long also when busy, so that its run can continue as new
    lease: float = 15.0  # how long intake trusts that a silent drain is still alive
    heartbeat: float = 12.0  # without one for this long, another worker takes a drain over
    safety_timer: float = 900.0  # the last net under lost wakes
    look: float = 1.0  # how often lost work is looked for
    lost_after: float = 30.0  # a message pushed this long ago and not in the list is lost
    busy: float = 5.0  # longest wait for the database's write lock; heartbeat must exceed it twice
    # Retries of one event at one receiver.
    attempts: int = 5
    backoff: float = 1.0  # doubling from here

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, home: Path | None = None) -> "Settings":
        """Settings of this process.

        Raises WrongSettings that names the variable when one is unusable.
        """
        env = os.environ if env is None else env
        home = (home or Path(env.get("SAISEI_HOME") or ".saisei")).expanduser().absolute()
        values: dict[str, float | int] = {}
        problems: dict[str, str] = {}
        for spec in fields(cls):
            text = env.get(f"SAISEI_{spec.name.upper()}")
            if spec.name in ("home", "database_url", "redis_url", "ui_url") or not text:
                continue
            kind = int if spec.name == "attempts" else float
            try:
                values[spec.name] = kind(text)
            except ValueError:
                values[spec.name] = -1
            if not 0 < values[spec.name] < 10**6:
                number = "whole number" if kind is int else "number"
                problems[f"SAISEI_{spec.name.upper()}"] = f"{text!r} is not a positive {number} below 1,000,000"
        redis_url = env.get("REDIS_URL") or None
        if redis_url is not None and not redis_url.startswith(_REDIS_SCHEMES):
            # Without its value, which may hold a password.
            problems["REDIS_URL"] = f"must begin with {', '.join(_REDIS_SCHEMES[:-1])} or {_REDIS_SCHEMES[-1]}"
        # The embedded stack tells its children by the second name: it hides TEMPORAL_* of other servers from them.
        ui_url = env.get("TEMPORAL_UI_URL") or env.get("SAISEI_UI_URL") or None
        if ui_url is not None and not ui_url.startswith(("http://", "https://")):
            problems["TEMPORAL_UI_URL"] = "must begin with http:// or https://"
        if problems:
            raise WrongSettings(problems)
        settings = cls(
            home=home,
            database_url=env.get("DATABASE_URL") or f"sqlite:///{quote(str(home / 'saisei.db'))}",
            redis_url=redis_url,
            ui_url=ui_url,
            **values,  # type: ignore[arg-type]
        )
        if settings.heartbeat < 2 * settings.busy + 1:
            # A drain waits in line for the lock, then for a program that is not ours. Without a heartbeat meanwhile
            # it would be taken for dead, and a second one started beside it.
            raise WrongSettings({"SAISEI_HEARTBEAT": "must exceed twice SAISEI_BUSY by at least a second"})
        return settings

    @property
    def timings(self) -> Timings:
        """The waits that long-lived runs carry with them."""
        return Timings(
            heartbeat_timeout=self.heartbeat,
            # Room for a last batch: a drain that was cut off would be taken for one that failed.
            drain_timeout=max(600.0, 2 * self.drain),
            safety_timer=self.safety_timer,
        )


# What processes of Saisei read under its own prefix: `Settings` above, `http_api.settings`, and `--api` without a URL.
NAMES = frozenset(
    {f"SAISEI_{spec.name.upper()}" for spec in fields(Settings) if spec.name not in ("database_url", "redis_url")}
    | {f"SAISEI_API_{name}" for name in ("HOST", "PORT", "DRAIN", "URL")}
)


def unknown_settings(env: Mapping[str, str] | None = None) -> str | None:
    """A sentence for a person whose settings have no effect, or None.

    They are ignored and no error: the environment is not ours alone. Kubernetes, for one, puts variables of its own
    there for a service that is called saisei.
    """
    unknown = sorted(name for name in (os.environ if env is None else env) if name.startswith("SAISEI_"))
    known = sorted(NAMES | {"DATABASE_URL", "REDIS_URL", "TEMPORAL_UI_URL"})
    told = []
    for name in unknown:
        if name not in NAMES:
            near = difflib.get_close_matches(name, known, 1, 0.75)
            told.append(f"{name} ({near[0]}?)" if near else name)
    return f"ignored, since Saisei has no such setting: {', '.join(told)}" if told else None


def no_arguments(program: str, purpose: str) -> None:
    """Let a program that is told everything by the environment answer `--help`, and end it for any other argument."""
    parser = argparse.ArgumentParser(
        prog=program, description=purpose, epilog="Settings come from the environment; README.md lists them."
    )
    _, rest = parser.parse_known_args()
    if rest:
        parser.exit(2, f"{program}: takes no arguments, but got {' '.join(rest)}; see {program} --help\n")


def end(code: int) -> NoReturn:
    """End this process now, without taking Python's interpreter down.

    Temporal's threads outlive the event loop; one that lets go of a Python object while the interpreter is taken down
    aborts the process ("PyGILState_Release", exit code 134) after all its work was done.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk or a reader that has gone, told or silenced before
            stream.flush()
    os._exit(code)
