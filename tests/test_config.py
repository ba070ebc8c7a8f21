"""Settings from the environment: each bad variable is named, each good one arrives."""

import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import sqlalchemy as sa

from config import NAMES, Settings, unknown_settings
from contracts.errors import InvalidInput
from store.engine import Database
from tests.http.server import ROOT, environment

OTHERS = ("home", "database_url", "redis_url", "ui_url", "attempts")
DURATIONS = [spec.name for spec in fields(Settings) if spec.name not in OTHERS]


def test_without_any_variable_data_lives_in_one_folder_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_env({})
    assert settings.home == tmp_path / ".saisei"
    assert settings.database_url == f"sqlite:///{tmp_path}/.saisei/saisei.db"
    assert settings.redis_url is None
    assert settings.heartbeat > settings.busy
    assert (settings.timings.heartbeat_timeout, settings.timings.safety_timer) == (12.0, 900.0)


def test_each_part_is_taken_from_its_variable(tmp_path: Path) -> None:
    env = {
        "SAISEI_HOME": str(tmp_path),
        "DATABASE_URL": "postgresql://db/saisei",
        "REDIS_URL": "redis://cache:6379/0",
        "SAISEI_IDLE": "2.5",
        "SAISEI_ATTEMPTS": "7",
    }
    settings = Settings.from_env(env)
    assert (settings.home, settings.database_url, settings.redis_url) == (
        tmp_path,
        "postgresql://db/saisei",
        "redis://cache:6379/0",
    )
    assert (settings.idle, settings.attempts) == (2.5, 7)
    assert Settings.from_env(env, home=tmp_path / "other").home == tmp_path / "other"
    empty = Settings.from_env({name: "" for name in env})
    assert (empty.redis_url, empty.idle) == (None, 1.0)


@pytest.mark.parametrize("name", [*DURATIONS, "attempts"])
@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "1e9", "1,5", " "])
def test_a_bad_variable_is_named(name: str, value: str) -> None:
    variable = f"SAISEI_{name.upper()}"
    with pytest.raises(InvalidInput) as raised:
        Settings.from_env({variable: value})
    assert list(raised.value.fields) == [variable]
    assert repr(value) in str(raised.value)


def test_half_an_attempt_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"SAISEI_ATTEMPTS: '2\.5' is not a positive whole number"):
        Settings.from_env({"SAISEI_ATTEMPTS": "2.5"})


def test_all_bad_variables_are_named_at_once() -> None:
    with pytest.raises(InvalidInput) as raised:
        Settings.from_env({"SAISEI_IDLE": "x", "SAISEI_LOOK": "-3", "SAISEI_DRAIN": "5"})
    assert sorted(raised.value.fields) == ["SAISEI_IDLE", "SAISEI_LOOK"]


def test_an_address_that_no_browser_opens_is_refused() -> None:
    with pytest.raises(InvalidInput, match="TEMPORAL_UI_URL: must begin with http:// or https://"):
        Settings.from_env({"TEMPORAL_UI_URL": "ui.example"})


@pytest.mark.parametrize(
    ("busy", "heartbeat", "good"), [("5", "12", True), ("5", "11", True), ("5", "10.9", False), ("8", "12", False)]
)
def test_a_drain_that_waits_for_the_lock_is_not_taken_for_dead(busy: str, heartbeat: str, good: bool) -> None:
    """It may wait in line among ours and then for a foreign program, each time for as long as `busy`."""
    env = {"SAISEI_BUSY": busy, "SAISEI_HEARTBEAT": heartbeat}
    if good:
        assert Settings.from_env(env).busy == float(busy)
    else:
        with pytest.raises(InvalidInput, match="SAISEI_HEARTBEAT"):
            Settings.from_env(env)


@pytest.mark.parametrize("name", ["plain", "with space", "50%", "%41", "a?b", "a#b", "注文", "a&b=c", "a@b:c"])
def test_a_folder_of_any_name_holds_the_database(tmp_path: Path, name: str) -> None:
    settings = Settings.from_env({"SAISEI_HOME": str(tmp_path / name)})
    database = Database(settings.database_url)
    with database.write() as connection:
        connection.execute(sa.text("CREATE TABLE t (n INTEGER)"))
    database.close()
    assert (tmp_path / name / "saisei.db").exists()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("SAISEI_HOMEE", "SAISEI_HOMEE (SAISEI_HOME?)"),
        ("SAISEI_HEARTBEATS", "SAISEI_HEARTBEATS (SAISEI_HEARTBEAT?)"),
        ("SAISEI_DATABASE_URL", "SAISEI_DATABASE_URL (DATABASE_URL?)"),
        ("SAISEI_COLOUR_OF_THE_SKY", "SAISEI_COLOUR_OF_THE_SKY"),
    ],
)
def test_a_setting_that_there_is_not_is_named_with_the_nearest_that_there_is(name: str, told: str) -> None:
    assert unknown_settings({name: "x", "SAISEI_IDLE": "1"}) == f"ignored, since Saisei has no such setting: {told}"


def test_nothing_is_said_of_settings_that_there_are_and_of_what_is_not_ours() -> None:
    assert unknown_settings(dict.fromkeys([*NAMES, "DATABASE_URL", "REDIS_URLS", "HOME", "SAISEIHOME"], "x")) is None


@pytest.mark.parametrize("words", [["starter.py", "links"], ["worker.py"], ["api.py"]])
def test_every_process_says_on_stderr_which_settings_it_ignores(tmp_path: Path, words: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # nothing is to start
        env = environment(tmp_path / "home", SAISEI_API_PORT=str(taken.getsockname()[1]), SAISEI_HOMEE="x")
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    ignored, error = done.stderr.splitlines()
    assert ignored.endswith("ignored, since Saisei has no such setting: SAISEI_HOMEE (SAISEI_HOME?)")
    assert (done.returncode, done.stdout) == (1, "")
    assert error.startswith(words[0].removesuffix(".py"))
