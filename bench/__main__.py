"""`python -m bench [NAME] [--json]`: run one benchmark, or all of them, and print the figures beside their floors.

All of them take less work each than one alone does, so that they take less than five minutes, and say how much it was.

To add one: a module with `run(count) -> list[Row]`, a docstring whose first line says what it measures, a COUNT that it
runs with by itself, a FEWER that `make bench` runs it with (COUNT if there is none), and its name in BENCHMARKS.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import ModuleType

from rich.console import Console
from rich.table import Table

from bench.report import Row
from config import end
from contracts.errors import SaiseiError
from embedded.errors import EmbeddedError

BENCHMARKS = ("drain", "latency", "jobs", "intake", "growth", "rest", "cost", "poison", "contention", "rebuild")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; 0, also when a goal is missed: the row says so, and a shared machine proves nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog="\n".join(f"{name:12} {_first_line(name)}" for name in BENCHMARKS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", nargs="?", help="one of those below; all if none")
    parser.add_argument("--count", type=int, help="how much work, if not what `make bench` takes")
    parser.add_argument("--json", action="store_true", help="JSON lines, also on a terminal")
    args = parser.parse_args(arguments)
    if args.count is not None and args.count < 1:
        parser.error("--count must be at least 1")
    failed = False
    for name in [args.name] if args.name else BENCHMARKS:
        module = _module(name)
        count: int = args.count or (module.COUNT if args.name else getattr(module, "FEWER", module.COUNT))
        started = time.monotonic()
        try:
            rows: list[Row] = module.run(count)
        except (SaiseiError, EmbeddedError) as error:
            print(f"bench {name}: {error}", file=sys.stderr)
            failed = True
            continue
        title = name if count == module.COUNT else f"{name} with {count:,} instead of {module.COUNT:,}"
        show(title, _first_line(name), rows, time.monotonic() - started, as_json=args.json)
    return int(failed)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"bench.{name}")


def _first_line(name: str) -> str:
    return (_module(name).__doc__ or "").splitlines()[0]


def show(name: str, words: str, rows: Sequence[Row], seconds: float, *, as_json: bool) -> None:
    """A table on a terminal, JSON lines otherwise."""
    if as_json or not sys.stdout.isatty():
        for each in rows:
            print(json.dumps(asdict(replace(each, name=f"{name}: {each.name}"))), flush=True)
    else:
        Console(highlight=False).print(_table(f"{name}: {words}", rows, seconds))


def _table(title: str, rows: Sequence[Row], seconds: float) -> Table:
    table = Table(title=title, caption=f"{seconds:.0f} s", title_justify="left", caption_justify="left")
    table.add_column("what")
    for column in ("value", "floor", "ratio", "goal"):
        table.add_column(column, justify="right")
    table.add_column("")
    for row in rows:
        verdict = "" if row.ok is None else "ok" if row.ok else "missed"
        floor = "" if row.floor is None else f"{row.floor:,.1f} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.name, f"{row.value:,.1f} {row.unit}", floor, ratio, row.goal or "", verdict)
    return table


if __name__ == "__main__":
    end(main())
