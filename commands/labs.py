"""`lab delivery`, `lab outbox` and `lab recovery`: walk-throughs on servers of their own. They touch no live data."""

import contextlib
import itertools
import shlex
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from commands.context import Context
from commands.following import MANY, progress
from commands.parsing import Commands, command, integer, whole_number
from labs import delivery, outbox, recovery, recovery_state
from labs.scratch import Scratch, scratch_stack
from labs.verdict import Verdict


def add(commands: Commands) -> None:
    """Register the commands."""
    group = commands.group("lab")
    default = delivery.Plan()
    one = command(
        group,
        "delivery",
        _delivery,
        "one event at two receivers and one job, through failures",
        "starter.py lab delivery --event order-7 --job job-1 --amount 100",
    )
    one.add_argument("--event", default=default.event, help=f"id of the event ({default.event} if not said)")
    one.add_argument("--job", default=default.job, help=f"id of the job ({default.job} if not said)")
    one.add_argument("--amount", type=integer, default=default.amount, help=f"the sum ({default.amount} if not said)")
    one.add_argument("--keep", action="store_true", help="leave the servers up, and say how to stop them")
    two = command(
        group,
        "outbox",
        _outbox,
        "the outbox in eight steps, with its results in files",
        "starter.py lab outbox --dir outbox-lab --orders 3",
    )
    two.add_argument("--dir", type=Path, required=True, help="folder of the database app.db and of the results")
    two.add_argument("--orders", type=integer, default=3, help="how many orders (3 if not said)")
    three = command(
        group,
        "recovery",
        _recovery,
        "an outage, dead letters, a rebuild that is proved equal, and a redrive that changes nothing",
        "starter.py lab recovery --first 12 --during 8",
    )
    most = whole_number(1, 1000)
    usual = recovery_state.Plan()
    three.add_argument("--first", type=most, default=usual.first, help=f"orders before it ({usual.first} if not said)")
    three.add_argument("--during", type=most, default=usual.during, help=f"orders in it ({usual.during} if not said)")
    three.add_argument("--keep", action="store_true", help="leave the servers up, and say how to stop them")


def exit_code(context: Context, verdict: Verdict) -> int:
    """0 for a good verdict; else 1, and each thing that was wrong as a sentence."""
    for problem in verdict.problems:
        context.say(f"{verdict.name}: {problem}")
    return 0 if verdict.ok else 1


def verdict_document(verdict: Verdict) -> dict[str, object]:
    """The part of a walk-through's JSON document that all share."""
    return {
        "verdict": verdict.word,
        "reason": verdict.sentence,
        "problems": verdict.problems,
        "counts": verdict.counts,
    }


async def run_delivery(
    context: Context, plan: delivery.Plan, line: Callable[[str], None], *, keep: bool = False
) -> tuple[Verdict, Scratch]:
    """The walk-through on a stack of its own: its verdict, and what the stack was (gone by now unless kept)."""
    async with contextlib.AsyncExitStack() as stack:
        # Only while nothing is printed: a live display takes stdout over.
        with context.messages.status("starting servers for the walk-through"):
            scratch = await stack.enter_async_context(scratch_stack(keep=keep))
        return await delivery.walk(plan, scratch, line), scratch


async def run_outbox(
    context: Context, folder: Path, orders: int, tell: Callable[[outbox.Step], None]
) -> outbox.Outcome:
    """The walk-through in `folder`, which `lab_folder` holds, on a Valkey of its own."""
    bar = progress(context, wanted=orders >= MANY)
    task = bar.add_task("placing", total=orders, start=False)

    def placed(number: int) -> None:
        if number == 1:
            bar.start()
            bar.start_task(task)
        bar.update(task, completed=number)
        if number == orders:
            bar.stop()

    try:
        async with scratch_stack(services=("valkey",)) as scratch:
            return await outbox.walk(folder, orders, scratch, tell, placed)
    finally:
        bar.stop()


async def run_recovery(
    context: Context, plan: recovery_state.Plan, tell: Callable[[recovery_state.Step], None], *, keep: bool = False
) -> tuple[Verdict, Scratch]:
    """The walk-through on a stack of its own: its verdict, and what the stack was (gone by now unless kept)."""
    async with contextlib.AsyncExitStack() as stack:
        with context.messages.status("starting servers for the walk-through"):
            scratch = await stack.enter_async_context(scratch_stack(children=recovery.children(), keep=keep))
        return await recovery.walk(plan, scratch, tell), scratch


def show_recovery_step(context: Context, number: int, step: recovery_state.Step) -> None:
    """The step's sentence, and a table of what was read."""
    state = step.state
    proof = str(state.certificate["digest"])[:19] + "..." if state.certificate else ""
    context.line(f"{number}  {step.name}: {step.what}")
    context.table(
        ["orders", "sales orders", "sales amount", "mail", "dead", "intake", "generation", "certificate"],
        [
            [
                state.orders,
                state.sales_orders,
                f"{state.sales_amount:,}",
                state.mail,
                state.dead,
                state.intake,
                state.generation,
                proof,
            ]
        ],
    )
    context.line("")


def show_step(number: int, step: outbox.Step) -> None:
    """One line a step."""
    print(f"{number}  {step.name:16} {step.showed}", flush=True)


async def _delivery(context: Context, args: Namespace) -> int:
    plan = delivery.Plan(args.event, args.job, args.amount).checked()
    lines: list[str] = []

    def line(text: str) -> None:
        lines.append(text)
        if not context.json:
            print(text, flush=True)

    verdict, scratch = await run_delivery(context, plan, line, keep=args.keep)
    if args.keep:
        _tell_kept(context, scratch)
    if context.json:
        names = {"event": plan.event, "job": plan.job, "amount": plan.amount}
        context.result({**verdict_document(verdict), **names, "lines": lines, "web_ui": scratch.ui_url})
    return exit_code(context, verdict)


async def _recovery(context: Context, args: Namespace) -> int:
    steps: list[recovery_state.Step] = []

    def tell(step: recovery_state.Step) -> None:
        steps.append(step)
        if not context.json:
            show_recovery_step(context, len(steps), step)

    verdict, scratch = await run_recovery(context, recovery_state.Plan(args.first, args.during), tell, keep=args.keep)
    if args.keep:
        _tell_kept(context, scratch)
    if context.json:
        context.result([step.document() for step in steps])
    elif verdict.ok:
        context.line(f"{verdict.name} {verdict.word}: {verdict.reason}")
    return exit_code(context, verdict)


def _tell_kept(context: Context, scratch: Scratch) -> None:
    context.say(f"the servers are kept: {scratch.ui_url} shows the runs")
    context.say(f"stop them with: SAISEI_HOME={shlex.quote(str(scratch.home))} starter.py down")


async def _outbox(context: Context, args: Namespace) -> int:
    outbox.check_orders(args.orders)
    folder = args.dir.expanduser().absolute()
    numbers = itertools.count(1)

    def tell(step: outbox.Step) -> None:
        if not context.json:
            show_step(next(numbers), step)

    with outbox.lab_folder(folder) as afresh:
        if afresh:
            context.say(f"{folder} holds the results of an earlier run; this one starts afresh and replaces them")
        outcome = await run_outbox(context, folder, args.orders, tell)
    if context.json:
        steps = [{"step": step.name, "showed": step.showed} for step in outcome.steps]
        context.result({**verdict_document(outcome.verdict), "dir": str(folder), "afresh": afresh, "steps": steps})
    return exit_code(context, outcome.verdict)
