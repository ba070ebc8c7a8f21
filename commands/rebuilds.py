"""`rebuild`, `execution` and `generations`: a new copy of the sales totals, verified before it is switched to.

A rebuild and a rollback are one durable run; the commands follow the database's row of it, which tells the phase and
the counts whoever does the work. Without `--wait` a command ends once that row exists.
"""

import asyncio
import contextlib
import json
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError

from commands.chunks import in_chunks
from commands.context import Context
from commands.following import follow, progress
from commands.parsing import Commands, command
from commands.waiting import failure, standing
from contracts.counts import counted
from contracts.errors import Refused, Unreachable
from contracts.messages import RebuildInput
from contracts.names import REBUILD_ID
from store.clock import iso, now_ms
from store.generations import Generation, begin_drop, count_rows, drop_chunk, list_generations
from store.rebuild import (
    COMPLETED,
    REBUILD,
    ROLLBACK,
    RUNNING,
    Rebuild,
    get_rebuild,
    last_rebuild,
    rebuild_of_run,
    running_rebuild,
)

_POLL = 0.05
_PATIENCE = 15.0  # seconds until a worker must have begun it, for somebody who waits
_SAY_AFTER = 1.5
_ENDING = 10.0  # seconds that a run may need to clear up
_LONGEST_BOUND = 7 * 86_400


def add(commands: Commands) -> None:
    """Register the commands."""
    rebuild = commands.command("rebuild", _rebuild, "starter.py rebuild --wait --resume")
    _add_run_flags(rebuild)
    commands.command("execution", _execution, "starter.py execution --json")
    group = commands.group("generations")
    command(group, "list", _list, "list the generations, oldest first", "starter.py generations list")
    rollback = command(
        group,
        "rollback",
        _rollback,
        "go back to a retired generation: it is brought up to date, proved equal and switched to, like a new one",
        "starter.py generations rollback initial --wait",
    )
    rollback.add_argument(
        "generation", nargs="?", help="its name; the one that was active last if not said", metavar="GENERATION"
    )
    _add_run_flags(rollback)
    drop = command(
        group,
        "drop",
        _drop,
        "remove the rows of a retired or failed generation; it cannot be gone back to then",
        "starter.py generations drop generation-1",
    )
    drop.add_argument("generation", metavar="GENERATION", help="its name")


def _add_run_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="show its progress, and end with its outcome")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="open intake again with the switch; otherwise it stays paused until `intake resume`",
    )
    parser.add_argument(
        "--drain-bound",
        type=_seconds,
        default=RebuildInput.drain_bound,
        metavar="S",
        help=f"seconds to wait until each order has its deliveries ({RebuildInput.drain_bound:g} if not said)",
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= _LONGEST_BOUND:
        raise ArgumentTypeError(f"must be a number of seconds above 0 and up to {_LONGEST_BOUND:,}, not {text!r}")
    return value


def rebuild_document(context: Context, rebuild: Rebuild) -> dict[str, Any]:
    """A rebuild or rollback as JSON shows it."""
    return {
        "rebuild": rebuild.rebuild_id,
        "kind": rebuild.kind,
        "state": rebuild.state,
        "phase": rebuild.phase,
        "generation": rebuild.generation,
        "base_generation": rebuild.base_generation,
        "expected": rebuild.expected,
        "replayed": rebuild.replayed,
        "started_at": iso(rebuild.started_at),
        "ended_at": iso(rebuild.ended_at),
        "seconds": _elapsed(rebuild),
        "resume": rebuild.resume,
        "error": rebuild.error,
        "certificate": json.loads(rebuild.certificate) if rebuild.certificate else None,
        "link": _link(context),
    }


async def _rebuild(context: Context, args: Namespace) -> int:
    return await _run(context, args, RebuildInput(REBUILD))


async def _rollback(context: Context, args: Namespace) -> int:
    return await _run(context, args, RebuildInput(ROLLBACK, target=args.generation))


async def _run(context: Context, args: Namespace, kind: RebuildInput) -> int:
    running = await asyncio.to_thread(_running, context)
    if running is not None:
        raise Refused(f"{running.rebuild_id} runs already{_at(context)}; wait for it with `execution`, or cancel it")
    message = RebuildInput(
        kind.kind,
        target=kind.target,
        resume=args.resume,
        drain_bound=args.drain_bound,
    )
    handle = await _started(context, message)
    rebuild = await _begun(context, handle)
    if args.wait:
        rebuild = await _followed(context, rebuild, handle)
    if context.json:
        context.result(rebuild_document(context, rebuild))
    elif args.wait:
        _print(context, rebuild)
    else:
        context.line(f"{rebuild.rebuild_id}: {rebuild.base_generation} -> {rebuild.generation}, {rebuild.state}")
        if link := _link(context):
            context.line(link)
    return 0 if rebuild.state in (RUNNING, COMPLETED) else 1


async def _started(context: Context, message: RebuildInput) -> WorkflowHandle[Any, Any]:
    """Its run. One whose outcome stands still clears up for a moment; that is waited for. Raises Refused."""
    runs = await context.runs()
    deadline = time.monotonic() + _ENDING
    while True:
        try:
            return await runs.start_rebuild(message)
        except WorkflowAlreadyStartedError:
            if time.monotonic() > deadline or await asyncio.to_thread(_running, context) is not None:
                raise Refused(f"a rebuild or rollback runs already{_at(context)}; wait for it, or cancel it") from None
        await asyncio.sleep(_POLL)


async def _begun(context: Context, handle: WorkflowHandle[Any, Any]) -> Rebuild:
    """Its row, as soon as there is one. Raises Refused when it ended without, Unreachable when no worker takes it."""
    run_id = handle.first_execution_run_id or handle.result_run_id or ""
    result = asyncio.ensure_future(handle.result())
    started = time.monotonic()
    told = False
    try:
        while True:
            ended = (await asyncio.wait([result], timeout=_POLL))[0]
            rebuild = await asyncio.to_thread(_of_run, context, run_id)
            if rebuild is not None:
                return rebuild
            if ended:
                try:
                    await result
                except WorkflowFailureError as error:
                    raise Refused(failure(error).text) from error
                raise Refused("it ended before it began; see its run in the Web UI")
            waited = time.monotonic() - started
            if waited > _PATIENCE:
                raise Unreachable("no worker has begun it yet; it begins when one runs (`make up` starts one)")
            if waited > _SAY_AFTER and not told:
                told = True
                context.say(f"{handle.id}: {await standing(handle) or 'is asked for'}")
    except asyncio.CancelledError:
        context.say(f"{handle.id} goes on without this command: it begins, and pauses intake, when a worker runs")
        raise
    finally:
        result.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await result


async def _followed(context: Context, rebuild: Rebuild, handle: WorkflowHandle[Any, Any]) -> Rebuild:
    """Show the row's phase and counts until it is over."""
    counts = TextColumn("{task.completed:,.0f} of {task.total:,.0f}")
    bar = progress(context, TextColumn("{task.description}"), BarColumn(), counts, TimeElapsedColumn())

    async def why(rebuild: Rebuild) -> str | None:
        with contextlib.suppress(RPCError):
            return f"{rebuild.rebuild_id}, {rebuild.phase}: {await standing(handle) or 'is under way'}"
        return None

    return await follow(
        context,
        bar,
        rebuild,
        read=lambda connection: get_rebuild(connection, rebuild.rebuild_id),
        runs=lambda rebuild: rebuild.state == RUNNING,
        show=lambda rebuild: {
            "description": rebuild.phase,
            "completed": rebuild.replayed,
            "total": max(rebuild.expected, 1),
        },
        leaving=f"{rebuild.rebuild_id} goes on without this command; `execution` shows it",
        silence=_PATIENCE,
        why=why,
    )


async def _execution(context: Context, args: Namespace) -> int:
    with context.database.read() as connection:
        rebuild = last_rebuild(connection)
    if context.json:
        context.result(None if rebuild is None else rebuild_document(context, rebuild))
    elif rebuild is None:
        context.line("there was no rebuild yet; `rebuild` starts one")
    else:
        _print(context, rebuild)
    return 0


def _print(context: Context, rebuild: Rebuild) -> None:
    document = rebuild_document(context, rebuild)
    certificate = document["certificate"]
    proof = None
    if certificate:
        sums = ", ".join(
            f"{counted(orders, 'order')}, {amount:,} {code}" for code, (orders, amount) in certificate["sums"].items()
        )
        proof = f"{sums or 'no orders'}; {certificate['digest']}; verified at {certificate['verified_at']}"
    context.fields(
        {
            "rebuild": f"{rebuild.rebuild_id} {rebuild.state}",
            "phase": rebuild.phase,
            "generation": f"{rebuild.generation}, instead of {rebuild.base_generation}",
            "counts": f"{rebuild.expected:,} expected, {rebuild.replayed:,} replayed",
            "started": document["started_at"],
            "ended": document["ended_at"],
            "elapsed": f"{document['seconds']:.1f} s",
            "outcome": _outcome(rebuild),
            "certificate": proof,
            "link": document["link"],
        }
    )


def _outcome(rebuild: Rebuild) -> str:
    if rebuild.state == RUNNING:
        return "it runs; intake is paused until it is over"
    if rebuild.state == COMPLETED:
        intake = "intake is open again" if rebuild.resume else "intake stays paused until `intake resume`"
        return f"ACTIVATED: {rebuild.generation} is served; {intake}"
    return (
        f"FAILED: {rebuild.error}; {rebuild.base_generation} stays active, "
        "and intake stays paused until `intake resume` or another rebuild"
    )


async def _list(context: Context, args: Namespace) -> int:
    with context.database.read() as connection:
        found = list_generations(connection)
    if context.json:
        context.result([_generation_document(each) for each in found])
        return 0
    context.table(
        ["generation", "state", "created", "totals", "certificate"],
        (
            [
                each.generation,
                each.state,
                iso(each.created_at),
                ", ".join(f"{counted(n, 'order')}, {amount:,} {code}" for code, (n, amount) in each.totals.items()),
                json.loads(each.certificate)["digest"][:19] + "..." if each.certificate else "",
            ]
            for each in found
        ),
    )
    return 0


def _generation_document(generation: Generation) -> dict[str, Any]:
    return {
        "generation": generation.generation,
        "state": generation.state,
        "created_at": iso(generation.created_at),
        "totals": {code: {"orders": n, "amount": amount} for code, (n, amount) in generation.totals.items()},
        "certificate": json.loads(generation.certificate) if generation.certificate else None,
    }


async def _drop(context: Context, args: Namespace) -> int:
    with context.database.write() as connection:
        changed = begin_drop(connection, args.generation)
    removed = await _remove(context, args.generation) if changed else 0
    if context.json:
        context.result({"generation": args.generation, "removed": removed, "changed": changed})
    else:
        context.line(
            f"{args.generation} is dropped" + (f", {counted(removed, 'row')} removed" if changed else " already")
        )
    return 0


async def _remove(context: Context, generation: str) -> int:
    """Its rows and then itself; how many rows."""
    with context.database.read() as connection:
        rows = count_rows(connection, generation)
    return await in_chunks(
        context,
        f"dropping {generation}",
        rows,
        lambda connection, limit: drop_chunk(connection, generation, limit),
    )


def _running(context: Context) -> Rebuild | None:
    with context.database.read() as connection:
        return running_rebuild(connection)


def _of_run(context: Context, run_id: str) -> Rebuild | None:
    with context.database.read() as connection:
        return rebuild_of_run(connection, run_id)


def _elapsed(rebuild: Rebuild) -> float:
    return ((rebuild.ended_at or now_ms()) - rebuild.started_at) / 1000


def _link(context: Context) -> str | None:
    return context.links.workflow(REBUILD_ID) if context.links else None


def _at(context: Context) -> str:
    link = _link(context)
    return f": {link}" if link else ""
