"""Who gives the command, as it goes on record."""

import getpass


def who() -> str:
    """The user's name, or `unknown` where the system has none for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
