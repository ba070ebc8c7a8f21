"""`dead list`, `dead redrive`, `dead waive`: what receivers could not take, and what a person does about it."""

import argparse
import re
import secrets
from argparse import ArgumentParser, Namespace
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from commands.context import Context
from commands.following import follow, progress
from commands.output import short
from commands.parsing import Commands, WrongUsage, command, whole_number
from commands.person import who
from commands.telling import tell, wake
from contracts.counts import counted
from contracts.names import REDRIVE_COMPLETED, REDRIVE_RUNNING, receiver_id, redrive_id
from store.clock import iso, now_ms
from store.dead_letters import (
    MAX_PAGE,
    DeadFilter,
    DeadLetter,
    ErrorTotal,
    ReceiverTotal,
    dead_letters,
    resolve,
    totals_by_error,
    totals_by_receiver,
    waive,
)
from store.deliveries import DEAD, WAIVED
from store.redrives import Redrive, freeze_redrive, get_redrive, refuse_waived

_LOOK_AFTER_MS = 5_000  # after this the worker's look starts a run that could not be started here
_SILENCE = 10.0  # seconds without progress after which a waiting person is told why that may be
_LONG_AGO = 1e11  # seconds: before all time that we count


def add(commands: Commands) -> None:
    """Register the commands."""
    group = commands.group("dead")
    listing = command(
        group, "list", _list, "list dead letters, totals first", "starter.py dead list --receiver sales --since 2h"
    )
    _add_filters(listing)
    listing.add_argument(
        "--limit", type=whole_number(1, MAX_PAGE), default=50, help=f"longest page, 1 to {MAX_PAGE:,} (50 if not said)"
    )
    listing.add_argument("--waived", action="store_true", help="list what was waived instead, with who and why")
    redrive = command(
        group,
        "redrive",
        _redrive,
        "make dead letters pending again, attempts from zero",
        "starter.py dead redrive --receiver sales --error TimeoutError --dry-run",
    )
    _add_filters(redrive)
    redrive.add_argument(
        "--all", action="store_true", help="every dead letter there is; required where no filter is given"
    )
    redrive.add_argument("--request", metavar="ID", help="name of this redrive; the same one twice does the work once")
    redrive.add_argument("--dry-run", action="store_true", help="count only, change nothing")
    redrive.add_argument("--no-wait", action="store_true", help="return when it is recorded, not when it is complete")
    letting_go = command(
        group,
        "waive",
        _waive,
        "let a dead letter go: it is never delivered there, and later events of its order go on",
        'starter.py dead waive order-7 --receiver sales --reason "refunded by hand"',
    )
    letting_go.add_argument("event", metavar="EVENT", help="an event's id or its order's")
    letting_go.add_argument("--receiver", required=True, help="the receiver that goes without it")
    letting_go.add_argument("--reason", required=True, help="why, in one line; it stays on record")


def _add_filters(parser: ArgumentParser) -> None:
    parser.add_argument("--receiver", help="of this receiver")
    parser.add_argument("--event", help="this event, by its id or its order's")
    parser.add_argument("--aggregate", help="of this aggregate, such as order/order-7")
    parser.add_argument("--error", metavar="TEXT", help="whose last error holds this text, case and all")
    parser.add_argument("--since", metavar="TIME", type=since, help="dead since: 2h, 30m, 1d12h, or ISO time (UTC)")


def since(text: str) -> tuple[int, str | None]:
    """(UTC ms, what was said where that is relative to now). Raises ArgumentTypeError."""
    parts = re.fullmatch(r"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?", text)
    if text and parts:
        try:
            days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
            span = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
        except (OverflowError, ValueError):
            span = _LONG_AGO
        return max(0, now_ms() - int(min(span, _LONG_AGO) * 1000)), text
    try:
        moment = datetime.fromisoformat(text)
        milliseconds = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; say a duration such as 2h or 30m, or an ISO time such as 2026-11-29T18:30"
        ) from None
    if milliseconds > now_ms():
        raise argparse.ArgumentTypeError(f"{text} is in the future")
    return max(0, milliseconds), None


def _filters(args: Namespace) -> DeadFilter:
    moment, said = args.since or (None, None)
    return DeadFilter(args.receiver, args.event, args.aggregate, args.error, moment, said)


async def _list(context: Context, args: Namespace) -> int:
    status = WAIVED if args.waived else DEAD
    with context.database.read() as connection:
        filters = resolve(connection, _filters(args))
        receivers = totals_by_receiver(connection, filters, status=status)
        errors = totals_by_error(connection, filters, status=status)
        page = dead_letters(connection, filters, args.limit, status=status)
    count = sum(each.count for each in receivers)
    if context.json:
        context.result({**_totals_document(receivers, errors), status: [_letter_document(each) for each in page]})
        return 0
    _print_totals(context, status, receivers, errors)
    if page:
        context.line("")
        _print_page(context, page, waived=args.waived)
    if count > len(page):
        context.say(f"{count - len(page):,} more; narrow it with a filter, or raise --limit")
    return 0


async def _redrive(context: Context, args: Namespace) -> int:
    filters = _filters(args)
    if args.all and not filters.is_empty():
        raise WrongUsage("--all goes with no filter; leave one of them out")
    if args.dry_run:
        return _count(context, filters)
    if filters.is_empty() and not args.all:
        raise WrongUsage("no filter is given; name one, or say --all for every dead letter there is")
    now = now_ms()
    request = args.request or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    with context.database.write() as connection:
        redrive, made = freeze_redrive(connection, request, filters, now, now + _LOOK_AFTER_MS)
    if made:
        context.say(f"redrive {request}: {counted(redrive.total, 'dead letter')}")
    else:
        context.say(f"redrive {request} was asked for at {iso(redrive.created_at)} already; nothing is done twice")
    started = redrive.state != REDRIVE_RUNNING or await _start(context, redrive)
    if started and not args.no_wait:
        redrive = await _wait(context, redrive)
    if context.json:
        context.result(_redrive_document(redrive, made=made))
    else:
        context.line(_redrive_sentence(redrive))
    return 0 if redrive.state in (REDRIVE_RUNNING, REDRIVE_COMPLETED) else 1


def _count(context: Context, filters: DeadFilter) -> int:
    with context.database.read() as connection:
        filters = resolve(connection, filters)
        receivers = totals_by_receiver(connection, filters)
        errors = totals_by_error(connection, filters)
        if not receivers:
            refuse_waived(connection, filters)
    if context.json:
        context.result({"dry_run": True, **_totals_document(receivers, errors)})
    else:
        _print_totals(context, DEAD, receivers, errors)
        context.say("nothing was changed (--dry-run)")
    return 0


async def _start(context: Context, redrive: Redrive) -> bool:
    if not await tell(context, lambda runs: runs.start_redrive(redrive.request_id, redrive.filters.get("receiver"))):
        return False
    if context.links:
        context.say(context.links.workflow(redrive_id(redrive.request_id)))
    return True


async def _wait(context: Context, redrive: Redrive) -> Redrive:
    bar = progress(context, TextColumn("redriving"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())

    async def why(_redrive: Redrive) -> str:
        return "no worker has moved it on for 10 seconds; it goes on when one does, also without this command"

    return await follow(
        context,
        bar,
        redrive,
        read=lambda connection: get_redrive(connection, redrive.request_id),
        runs=lambda redrive: redrive.state == REDRIVE_RUNNING,
        show=lambda redrive: {"completed": redrive.total - redrive.left, "total": redrive.total},
        leaving=f"redrive {redrive.request_id} goes on without this command",
        silence=_SILENCE,
        why=why,
    )


async def _waive(context: Context, args: Namespace) -> int:
    with context.database.write() as connection:
        waiver = waive(connection, args.receiver, args.event, args.reason, who(), now_ms())
    if waiver.created:
        await wake(context, [receiver_id(waiver.receiver)])
    if context.json:
        context.result(
            {
                "receiver": waiver.receiver,
                "event_id": waiver.event_id,
                "aggregate_id": waiver.aggregate_id,
                "reason": waiver.reason,
                "waived_by": waiver.by,
                "waived_at": iso(waiver.at),
                "created": waiver.created,
            }
        )
    else:
        context.line(waiver.sentence())
    return 0


def _totals_document(receivers: list[ReceiverTotal], errors: list[ErrorTotal]) -> dict[str, Any]:
    return {
        "count": sum(each.count for each in receivers),
        "by_receiver": [
            {
                "receiver": each.receiver,
                "count": each.count,
                "oldest": iso(each.oldest),
                "newest": iso(each.newest),
            }
            for each in receivers
        ],
        "by_error": [
            {"receiver": each.receiver, "error": each.kind, "count": each.count, "example": each.example}
            for each in errors
        ],
    }


def _letter_document(letter: DeadLetter) -> dict[str, Any]:
    document: dict[str, Any] = {
        "receiver": letter.receiver,
        "event_id": letter.event_id,
        "aggregate_id": letter.aggregate_id,
        "seq": letter.seq,
        "event_type": letter.event_type,
        "attempts": letter.attempts,
        "error": letter.error,
    }
    if letter.reason is None:
        return {**document, "dead_since": iso(letter.settled_at), "waiting_behind": letter.waiting}
    at = iso(letter.settled_at)
    return {**document, "reason": letter.reason, "waived_by": letter.settled_by, "waived_at": at}


def _redrive_document(redrive: Redrive, *, made: bool) -> dict[str, Any]:
    return {
        "request": redrive.request_id,
        "created": made,
        "filters": redrive.filters,
        "state": redrive.state,
        "total": redrive.total,
        "taken": redrive.taken,
        "skipped": redrive.skipped,
        "note": redrive.note,
        "created_at": iso(redrive.created_at),
        "ended_at": iso(redrive.ended_at),
    }


def _redrive_sentence(redrive: Redrive) -> str:
    note = f" ({redrive.note})" if redrive.note else ""
    return (
        f"redrive {redrive.request_id} {redrive.state}: {redrive.taken:,} of {redrive.total:,} pending again, "
        f"{redrive.skipped:,} skipped{note}"
    )


def _print_totals(context: Context, status: str, receivers: list[ReceiverTotal], errors: list[ErrorTotal]) -> None:
    count = sum(each.count for each in receivers)
    told = f"{count:,} waived" if status == WAIVED else counted(count, "dead letter")
    by_receiver = ", ".join(f"{each.receiver} {each.count:,}" for each in receivers)
    context.line(told + (f": {by_receiver}" if by_receiver else ""))
    if errors:
        context.line("")
        context.table(
            ("count", "receiver", "error", "for example"),
            [(f"{each.count:,}", each.receiver, each.kind, short(each.example)) for each in errors],
        )


def _print_page(context: Context, page: list[DeadLetter], *, waived: bool) -> None:
    if waived:
        context.table(
            ("receiver", "event", "waived at", "by", "reason"),
            [(each.receiver, each.event_id, iso(each.settled_at), each.settled_by, each.reason) for each in page],
        )
    else:
        context.table(
            ("receiver", "event", "dead since", "waiting", "error"),
            [
                (each.receiver, each.event_id, iso(each.settled_at), each.waiting, short(each.error or ""))
                for each in page
            ],
        )
