"""Events that Redis lost go through the relay again: by the look, for those that are late, and by hand for all."""

from functools import partial

from pipeline.event_list import EventList
from pipeline.writer import Writer
from store.outbox import lost_events, reset_to_pending

_AT_ONCE = 1000  # a transaction of some 20 ms


async def recover_outbox(writer: Writer, events: EventList, *, before: int, most: int | None = None) -> int:
    """Events published before `before` (UTC ms) that are in the list no more are `PENDING` again; how many. Stops
    once `most` are.

    A slow queue is not a lost one: nothing is sent again that may still stand in the list. What is reset meanwhile is
    pushed behind the head, so each turn finds others, and there is an end.
    """
    recovered = 0
    while True:
        head = await writer.call(events.first)
        name = head.decode(errors="replace") if head is not None else None
        lost = await writer.read(partial(lost_events, before=before, head=name, limit=_AT_ONCE))
        if not lost:
            return recovered
        count = await writer.write(partial(reset_to_pending, positions=lost))
        if not count:
            return recovered  # somebody else did it
        recovered += count
        if most is not None and recovered >= most:
            return recovered
