"""A count and its noun agree, wherever one is told to a person."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.counts import counted
from tests.test_architecture import part_of, project_files

ROOT = Path(__file__).resolve().parents[1]
# What is counted here, in the form that is wrong after a one.
PLURALS = re.compile(
    r" (?:\w+ )?(?:aggregates|attempts|charges|deliveries|drains|entries|events|ids|jobs|letters|orders|"
    r"receivers|redrives|rows|shipments|tables|times|workers)\b(?!=)"
)


def disagreeing(source: str) -> Iterator[str]:
    """Texts in which a number, whatever it is, stands before a plural. A constant in capitals is more than one, and an
    event type is no number."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            for value, after in zip(node.values, node.values[1:], strict=False):
                if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant):
                    name = ast.unparse(value.value)
                    if PLURALS.match(str(after.value)) and not name.isupper() and not name.endswith("_type"):
                        yield f"line {node.lineno}: {ast.unparse(node)}"
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.search("%d" + PLURALS.pattern, node.value)
        ):
            yield f"line {node.lineno}: {node.value}"


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0 dead letters"), (1, "1 dead letter"), (2, "2 dead letters"), (1234, "1,234 dead letters")],
)
def test_one_is_singular(count: int, told: str) -> None:
    assert counted(count, "dead letter") == told


def test_a_plural_of_its_own() -> None:
    assert [counted(count, "entry", "entries") for count in (1, 2)] == ["1 entry", "2 entries"]


@pytest.mark.parametrize(
    "path",
    # The embedded servers import nothing of ours and count deaths from the second on; a benchmark has thousands.
    [path for path in project_files() if part_of(path) not in ("bench", "embedded")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_number_stands_before_a_plural(path: Path) -> None:
    assert list(disagreeing(path.read_text())) == []


def test_the_rule_catches_what_it_is_for() -> None:
    assert list(disagreeing('f"{count:,} dead letters"'))
    assert list(disagreeing('"%d events were lost"'))
    assert not list(disagreeing("f\"{counted(count, 'dead letter')}, {MOST} times\""))
