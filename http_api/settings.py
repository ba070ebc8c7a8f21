"""What the API alone may be told from outside, beside config.Settings."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address

from contracts.errors import WrongSettings

HOST = "127.0.0.1"
EVERYWHERE = "0.0.0.0"
DEFAULT_PORT = 8080


@dataclass(frozen=True)
class ApiSettings:
    """`host`: the IPv4 address to listen at. `port`: 0 for any free one. `drain`: seconds during which, once told to
    stop, it still answers while `/readyz` already says no, so that a load balancer can turn away first."""

    host: str = HOST
    port: int = DEFAULT_PORT
    drain: float = 0.0

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "ApiSettings":
        """From SAISEI_API_HOST, SAISEI_API_PORT and SAISEI_API_DRAIN. Raises WrongSettings that names each."""
        env = os.environ if env is None else env
        problems = {}
        host, port, drain = env.get("SAISEI_API_HOST") or cls.host, cls.port, cls.drain
        try:
            IPv4Address(host)
        except ValueError:
            problems["SAISEI_API_HOST"] = (
                f"{host!r} is no IPv4 address; give {HOST}, or {EVERYWHERE} for all that there are"
            )
        text = env.get("SAISEI_API_PORT")
        if text:
            if text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535:
                port = int(text)
            else:
                problems["SAISEI_API_PORT"] = f"{text!r} is not a port; give a number from 0 (any free one) to 65535"
        text = env.get("SAISEI_API_DRAIN")
        if text:
            try:
                drain = float(text)
            except ValueError:
                drain = -1.0
            if not 0 <= drain <= 600:
                problems["SAISEI_API_DRAIN"] = f"{text!r} is not a number of seconds from 0 to 600"
        if problems:
            raise WrongSettings(problems)
        return cls(host, port, drain)

    @property
    def reachable_at(self) -> str:
        """The address under which programs of this machine find it."""
        return HOST if self.host == EVERYWHERE else self.host
