"""The pages as the tests read them: blocks that are marked, commands with the output that is quoted, tables, links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

_BLOCK = re.compile(r"^<!-- ([^>]*?) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# What differs from run to run. Counts do not, so they are compared.
_VARYING = (
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "TIME"),
    (r"127\.0\.0\.1:\d+", "ADDRESS"),
    (r"sha256:[0-9a-f]+", "sha256:DIGEST"),
    (r"\b\d+(\.\d+)? s\b", "N s"),
    (r" by \S+ at TIME", " by SOMEBODY at TIME"),
    (r"[ \t]+", " "),  # columns are as wide as what is in them
)


@dataclass(frozen=True)
class Quoted:
    """A command and what the page says that it prints."""

    command: str
    output: list[str]


def blocks(mark: str, page: str = README) -> list[str]:
    """The fenced blocks under `<!-- mark -->`."""
    return [body for name, body in _BLOCK.findall(page) if name == mark]


def commands(block: str) -> Iterator[Quoted]:
    """Each `$ command` with the lines below it."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, *output = part.rstrip("\n").split("\n")
        yield Quoted(command, output)


def normalized(lines: list[str]) -> list[str]:
    """Lines with what varies replaced by words, without empty ones at the end."""
    found = []
    for line in lines:
        for pattern, word in _VARYING:
            line = re.sub(pattern, word, line)
        found.append(line.rstrip())
    while found and not found[-1]:
        found.pop()
    return found


def agrees(quoted: list[str], printed: list[str]) -> bool:
    """Whether they are the same but for what varies; `...` stands for any lines."""
    wanted = normalized(quoted)
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in wanted)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in normalized(printed))) is not None


def first_column(heading: str) -> list[list[str]]:
    """Of the tables under that heading: the words in backquotes in each row's first cell."""
    section = re.split(rf"^## {re.escape(heading)}$", README, flags=re.MULTILINE)[1].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")][1:]
    return [found for row in rows if (found := re.findall(r"`([^`]+)`", row))]


def links(page: Path) -> list[str]:
    """Where the page's links lead."""
    return _LINK.findall(page.read_text())
