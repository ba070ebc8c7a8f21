"""`python -m bench NAME [--json]`: run one benchmark and print its rows.

To add one: a module with `run(count) -> list[Row]`, a docstring whose first line says what it measures, and a line
in BENCHMARKS.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from bench import contention, drain, rebuild
from bench.report import Row
from contracts.errors import SaiseiError
from embedded.errors import EmbeddedError

BENCHMARKS: dict[str, Callable[[int], list[Row]]] = {
    "contention": contention.run,
    "drain": drain.run,
    "rebuild": rebuild.run,
}
_MODULES = {"contention": contention, "drain": drain, "rebuild": rebuild}
_DEFAULT, _DEFAULTS = 50_000, {"rebuild": 1_000_000}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; 0, also when a goal is missed: the row says so, and a shared machine proves nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog="\n".join(f"{name:12} {_first_line(name)}" for name in BENCHMARKS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument(
        "--count", type=int, help=f"orders ({_DEFAULT:,} if not said; rebuild: {_DEFAULTS['rebuild']:,})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    args = parser.parse_args(arguments)
    count = _DEFAULTS.get(args.name, _DEFAULT) if args.count is None else args.count
    if count < 1:
        parser.error("--count must be at least 1")
    try:
        rows = BENCHMARKS[args.name](count)
    except (SaiseiError, EmbeddedError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"benchmark": args.name, "count": count, "rows": [asdict(row) for row in rows]}))
    else:
        Console(highlight=False).print(_table(args.name, rows))
    return 0


def _first_line(name: str) -> str:
    return (_MODULES[name].__doc__ or "").splitlines()[0]


def _table(name: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"{name}: {_first_line(name)}", title_justify="left")
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
    sys.exit(main())
