"""What the API alone may be told from outside, beside config.Settings."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from contracts.errors import WrongSettings

HOST = "127.0.0.1"
DEFAULT_PORT = 8080


@dataclass(frozen=True)
class ApiSettings:
    """`port`: 0 for any free one. `drain`: seconds during which, once told to stop, it still answers while `/readyz`
    already says no, so that a load balancer can turn away first."""

    port: int = DEFAULT_PORT
    drain: float = 0.0

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "ApiSettings":
        """From SAISEI_API_PORT and SAISEI_API_DRAIN. Raises WrongSettings that names the unusable one."""
        env = os.environ if env is None else env
        problems = {}
        port, drain = cls.port, cls.drain
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
        return cls(port, drain)
