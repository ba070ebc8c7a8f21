"""`demo`: starts what is missing, walks through everything, sends new orders through the pipeline, judges each."""

import contextlib
import itertools
import sys
import tempfile
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from redis import RedisError
from sqlalchemy.exc import DBAPIError
from temporalio.service import RPCError

import embedded
from commands.context import Context
from commands.following import progress
from commands.labs import run_delivery, run_outbox, run_recovery, show_recovery_step, show_step
from commands.parsing import Commands
from contracts import search
from contracts.counts import counted
from contracts.errors import SaiseiError, Unreachable
from intake import Intake
from labs import delivery, live, outbox, recovery_state
from labs.scratch import ended_at_once
from labs.verdict import Verdict
from pipeline.failure import describe
from runs.profile import configured_address
from runs.starts import Runs

_ORDERS = 20
_ROOT = Path(__file__).resolve().parent.parent


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.command("demo", _demo, "starter.py demo --keep")
    parser.add_argument(
        "--keep", action="store_true", help="leave the servers and the worker up, with links into the Web UI"
    )


async def _demo(context: Context, args: Namespace) -> int:
    verdicts = [await _judged(name, part, context) for name, part in _WALKS]
    servers = _Servers(args.keep)
    verdicts.append(await _judged("live", lambda context: _live(context, servers), context))
    if context.json:
        context.result(_document(verdicts, servers.links))
    else:
        _show(verdicts, servers)
    return 0 if all(verdict.ok for verdict in verdicts) else 1


@dataclass
class _Servers:
    """What became of the live run's servers: `stay` when they are up after it, with `links` into their Web UI."""

    keep: bool
    stay: bool = False
    links: dict[str, str] = field(default_factory=dict)


async def _judged(name: str, part: Callable[[Context], Awaitable[Verdict]], context: Context) -> Verdict:
    """The part's verdict; one that cannot go on is bad, and the others are run all the same."""
    if not context.json:
        print(f"\n{name}", flush=True)
    try:
        return await part(context)
    except BrokenPipeError:
        raise  # nobody reads any more
    except SaiseiError as error:
        return Verdict(name, problems=[str(error)])
    except (RedisError, RPCError, DBAPIError, OSError) as error:
        return Verdict(name, problems=[describe(error)])


async def _delivery(context: Context) -> Verdict:
    def line(text: str) -> None:
        if not context.json:
            print(text, flush=True)

    verdict, _ = await run_delivery(context, delivery.Plan(), line)
    return verdict


async def _outbox(context: Context) -> Verdict:
    numbers = itertools.count(1)

    def tell(step: outbox.Step) -> None:
        if not context.json:
            show_step(next(numbers), step)

    with tempfile.TemporaryDirectory(prefix="saisei-lab-") as name, outbox.lab_folder(Path(name)):
        return (await run_outbox(context, Path(name), 3, tell)).verdict


async def _recovery(context: Context) -> Verdict:
    numbers = itertools.count(1)

    def tell(step: recovery_state.Step) -> None:
        if not context.json:
            show_recovery_step(context, next(numbers), step)

    verdict, _ = await run_recovery(context, recovery_state.Plan(), tell)
    return verdict


# Each walk-through with the name of its verdict; the live run comes after them.
_WALKS: tuple[tuple[str, Callable[[Context], Awaitable[Verdict]]], ...] = (
    ("delivery", _delivery),
    ("outbox", _outbox),
    ("recovery", _recovery),
)


async def _live(context: Context, servers: _Servers) -> Verdict:
    # What is configured must answer before anything is started for it: here that is one sentence, in the worker's log
    # it would be many.
    context.open_database()
    if configured_address() is not None:
        await context.client()
    if context.settings.redis_url is not None:
        context.events  # noqa: B018 - connects
    with _stack(context) as stack:
        runs = await context.runs()
        intake = Intake(context.database, runs.wake)
        try:
            with progress(context, stays=True) as bar:
                task = bar.add_task(f"{counted(_ORDERS, 'order')} to all receivers", total=None)

                def advanced(done: int, total: int) -> None:
                    bar.update(task, completed=done, total=total)

                return await live.run(context.database, intake, _ORDERS, advanced)
        finally:
            if servers.keep:
                stack.keep()
            servers.stay = not stack.attached
            # A link must not lead to what is about to stop.
            if context.ui_url is not None and (servers.stay or configured_address() is not None):
                servers.links = _links(context.ui_url, runs)


@contextlib.contextmanager
def _stack(context: Context) -> Iterator[embedded.Stack]:
    """The embedded stack of this home: the one that is up, else one for the block, with what is not configured and a
    worker. Raises Unreachable, in one sentence."""
    stack = context.stack
    try:
        if stack is None:
            with context.messages.status("starting servers and a worker"), ended_at_once():
                stack = context.stack = _start(context)
        elif "worker" in stack.failing:
            raise Unreachable(
                f"the worker of {stack.home} dies again and again; see logs/worker.log there, then `make down`"
            )
        with stack:
            yield stack
    except embedded.EmbeddedError as error:
        raise Unreachable(str(error)) from error


def _start(context: Context) -> embedded.Stack:
    services = []
    if configured_address() is None:
        services.append("temporal")
    if context.settings.redis_url is None:
        services.append("valkey")
    worker = embedded.Child("worker", [sys.executable, str(_ROOT / "worker.py")], ready_line="worker ready")
    return embedded.start(
        context.settings.home, services=services, children=[worker], search_attributes=search.START_DEV
    )


def _links(ui_url: str, runs: Runs) -> dict[str, str]:
    """Name -> address in the Web UI: all runs, and each long-lived one."""
    base = f"{ui_url.rstrip('/')}/namespaces/{quote(runs.client.namespace, safe='')}/workflows"
    return {"all runs": base, **{stage: f"{base}/{quote(stage, safe='')}" for stage in runs.stages}}


def _document(verdicts: list[Verdict], links: dict[str, str]) -> dict[str, object]:
    return {
        **{verdict.name: verdict.word for verdict in verdicts},
        "reasons": {verdict.name: verdict.sentence for verdict in verdicts},
        "counts": {verdict.name: verdict.counts for verdict in verdicts},
        "links": links,
    }


def _show(verdicts: list[Verdict], servers: _Servers) -> None:
    print()
    for verdict in verdicts:
        print(f"{verdict.name:9} {verdict.word:3}  {verdict.sentence}")
        for problem in verdict.problems[1:]:
            print(f"{'':15}{problem}")
    print()
    for verdict in verdicts:
        if verdict.counts:
            print(f"{verdict.name:9} {'  '.join(f'{name} {number}' for name, number in verdict.counts.items())}")
    print()
    for name, address in servers.links.items():
        print(f"{name:17} {address}")
    if servers.stay:
        print("the servers stay up; `make down` stops them")
    else:
        print("what was started is stopped; the new orders of `live` stay in this home")
        print("`starter.py demo --keep` leaves the servers up, with links into the Web UI")
