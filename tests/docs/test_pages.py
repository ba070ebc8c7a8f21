"""The pages name what there is, all of it and nothing else; their links lead somewhere."""

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import commands.demo
from config import NAMES, Settings
from http_api.settings import ApiSettings
from starter import parser
from tests.docs.pages import PAGES, README, ROOT, agrees, blocks, first_column, links
from tests.docs.pages import commands as quoted_commands
from tests.labs.test_delivery import transcript

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
NAMED = {"home": "SAISEI_HOME", "database_url": "DATABASE_URL", "redis_url": "REDIS_URL", "ui_url": "TEMPORAL_UI_URL"}
ids = [str(page.relative_to(ROOT)) for page in PAGES]


def all_commands(of: argparse.ArgumentParser) -> Iterator[str]:
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from all_commands(child)
            return
    yield of.prog.removeprefix("starter.py ")


def test_every_command_is_told_and_every_one_told_exists() -> None:
    told = {name for row in first_column("Commands") for name in row if name != "starter.py"}
    assert told == set(all_commands(parser()))


@pytest.mark.parametrize("block", blocks("run"))
def test_every_quoted_command_parses(block: str) -> None:
    for quoted in quoted_commands(block):
        program, *arguments = shlex.split(quoted.command)
        if program == "starter.py":
            parser().parse_args(arguments)
        elif program == "make":
            assert set(arguments) <= TARGETS
        else:
            assert program == "curl"


def test_every_target_of_the_makefile_is_told_and_every_one_told_exists() -> None:
    assert set(re.findall(r"(?:`|\$ )make ([a-z-]+)", README)) == TARGETS


def test_every_setting_is_told_with_what_holds_without_it() -> None:
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| ([^|]+) \|", README, re.MULTILINE))
    wanted = {NAMED.get(spec.name, f"SAISEI_{spec.name.upper()}"): spec.default for spec in fields(Settings)}
    wanted |= {f"SAISEI_API_{spec.name.upper()}": spec.default for spec in fields(ApiSettings)}
    assert set(rows) == wanted.keys() | {"SAISEI_API_URL"}
    told = {name for name in rows if name.startswith("SAISEI_")} | {"SAISEI_UI_URL"}
    assert told == NAMES  # the others are told to have no effect
    for name, default in wanted.items():
        if isinstance(default, int | float):
            assert float(rows[name]) == default, name


def test_every_variable_that_the_code_knows_is_told() -> None:
    parts = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in ("tests", "build", ".venv")]
    known = {name for path in parts for name in re.findall(r"\bSAISEI(?:_[A-Z]+)+\b", path.read_text())}
    assert {name for name in known if name not in README} == set()


def test_every_part_stands_in_the_layout() -> None:
    told = {name.rstrip("/") for row in first_column("Layout") for name in row}
    parts = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {path.name for path in ROOT.glob("*.py")}
    assert told == parts | {"docs/decisions"}


def test_the_demo_has_all_its_verdicts_and_the_transcript_of_the_deliveries() -> None:
    (block,) = blocks("demo")
    for name in [*(name for name, _ in commands.demo._WALKS), "live"]:
        assert re.search(rf"^{name} +ok +\S", block, re.MULTILINE), name
    quoted = block.partition("\ndelivery\n")[2].partition("\n\n")[0]
    assert agrees(quoted.splitlines(), transcript().splitlines())


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if "://" not in link:
            assert (page.parent / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_no_page_tells_of_the_machine_that_it_was_written_on(page: Path) -> None:
    assert re.findall(r"(?<![\w.])/(?:root|tmp|work|opt|var)/\S*", page.read_text()) == []


def test_decisions_are_numbered_linked_and_built_alike() -> None:
    pages = sorted(ROOT.glob("docs/decisions/*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        assert str(page.relative_to(ROOT)) in links(ROOT / "README.md"), page.name
        headings = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
        assert headings[:3] == ["Context", "Decision", "Consequences"], page.name


def test_the_changelog_has_one_sentence_a_line() -> None:
    lines = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("- ")]
    assert [line for line in lines if not line.endswith(".") or re.search(r"[a-z]{3}\. [A-Z]", line)] == []


def test_every_kind_of_failure_names_tests_that_there_are() -> None:
    page = (ROOT / "docs/kinds-of-failure.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    kinds = [row for row in rows if not row.startswith(("| what goes wrong", "| ---"))]
    assert len(kinds) > 50
    for row in kinds:
        _, kind, tests, _ = row.split("|")
        named = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", tests)
        assert named, kind
        assert "".join(f"`{path}::{name}`" for path, name in named) == tests.replace(",", "").replace(" ", "")
        for path, name in named:
            defined = re.search(rf"^(async )?def {name}\(", (ROOT / "tests" / path).read_text(), re.MULTILINE)
            assert defined, f"{kind.strip()}: there is no {path}::{name}"
