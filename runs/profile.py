"""Which Temporal its own environment or profile names. Apart from connecting, which needs the whole client."""

from temporalio.envconfig import ClientConfig, ClientConnectConfig

from contracts.errors import WrongSettings


def configured_address() -> str | None:
    """The address that the environment or profile names, or None. Raises WrongSettings when they cannot be read."""
    return configured().get("target_host")


def configured_namespace() -> str:
    """The namespace that the environment or profile names, else `default`. Raises WrongSettings as above."""
    return configured().get("namespace") or "default"


def configured() -> ClientConnectConfig:
    """All that they say. Raises WrongSettings when they cannot be read."""
    try:
        return ClientConfig.load_client_connect_config()
    except Exception as error:  # the library's own kind, which it does not export
        reason = str(error).strip().splitlines()[0]
        raise WrongSettings({"Temporal's environment or profile": f"cannot be read ({reason})"}) from error
