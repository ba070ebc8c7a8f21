"""The servers, the databases, and workers that run our workflows in the sandbox that production uses."""

from tests.servers import (  # noqa: F401
    anyio_backend,
    client,
    redis_url,
    short_client,
    short_history_server,
    skipper,
    temporal_server,
    valkey_server,
)
from tests.store.conftest import (  # noqa: F401
    database,
    database_url,
    open_database,
    postgres,
    postgres_admin,
    postgres_server_url,
    postgres_url,
    sqlite,
    sqlite_template,
    sqlite_url,
)
