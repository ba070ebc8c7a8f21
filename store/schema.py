"""The tables. One metadata for SQLite and PostgreSQL.

Times are integers, UTC milliseconds since 1970: a zone can neither be lost nor guessed on either database, and
nothing is ordered by them. Money is integer minor units. `outbox.position` is given by the store and stands one
to one for the business event id; deliveries and effects are keyed by it because an ascending integer is cheap to
insert where a random text id made the same work twice as slow. Those hot tables carry no foreign key to the outbox:
they are only ever written from its rows, and outbox rows are never deleted.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData()

# SQLite numbers rows itself only for INTEGER, PostgreSQL wants 64 bits.
_Position = BigInteger().with_variant(Integer, "sqlite")
_BinaryText = Text().with_variant(Text(collation="C"), "postgresql")

PENDING, PUBLISHED = "PENDING", "PUBLISHED"  # outbox.status
OPEN, PAUSED = "OPEN", "PAUSED"  # control.intake
INITIAL = "initial"  # the first generation


def _integer(column: str) -> CheckConstraint:
    # SQLite would store 1.5 or 'x' in an integer column without a word. BIGINT: PostgreSQL's INTEGER ends at 2^31.
    return CheckConstraint(f"{column} = CAST({column} AS BIGINT)", name=f"{column}_is_integer")


def _one_of(column: str, *values: str) -> CheckConstraint:
    # Not `IN`: for each row SQLite would make a table of the list anew, which was a third of inserting a delivery.
    return CheckConstraint(" OR ".join(f"{column} = '{value}'" for value in values))


def _where(condition: str) -> dict[str, Any]:
    return {"sqlite_where": text(condition), "postgresql_where": text(condition)}


orders = Table(
    "orders",
    metadata,
    Column("id", _BinaryText, primary_key=True),
    Column("sku", Text, nullable=False),
    Column("qty", BigInteger, CheckConstraint("qty >= 1"), nullable=False),
    Column("amount", BigInteger, CheckConstraint("amount >= 1"), nullable=False),
    Column("currency", Text, nullable=False),
    Column("placed_at", BigInteger, nullable=False),
    _integer("qty"),
    _integer("amount"),
)

outbox = Table(
    "outbox",
    metadata,
    Column("position", _Position, primary_key=True, autoincrement=True),
    Column("event_id", _BinaryText, nullable=False, unique=True),
    Column("aggregate_id", Text, nullable=False),
    Column("seq", BigInteger, CheckConstraint("seq >= 1"), nullable=False),
    Column("event_type", Text, nullable=False),
    Column("payload", Text, nullable=False),
    Column(
        "status",
        Text,
        _one_of("status", "PENDING", "PUBLISHED"),
        nullable=False,
        server_default=PENDING,
    ),
    Column("published_at", BigInteger),  # of the latest push
    Column("first_published_at", BigInteger),
    Column("fanned_out_at", BigInteger),
    UniqueConstraint("aggregate_id", "seq"),
    # AUTOINCREMENT: a position is never given twice, even after a row was removed by hand.
    sqlite_autoincrement=True,
)
Index("outbox_pending", outbox.c.position, **_where("status = 'PENDING'"))
Index(
    "outbox_in_flight",
    outbox.c.published_at,
    **_where("status = 'PUBLISHED' AND fanned_out_at IS NULL"),
)

subscriptions = Table(
    "subscriptions",
    metadata,
    # Which event types a receiver takes, and from where on: events up to `since_position` were there before it.
    Column("receiver", Text, primary_key=True),
    Column("event_type", Text, primary_key=True),
    Column("since_position", BigInteger, nullable=False),
)

ended_subscriptions = Table(
    "ended_subscriptions",
    metadata,
    # What a receiver took once: the events after `since_position` up to `until_position`, and no other since its end.
    Column("receiver", Text, primary_key=True),
    Column("event_type", Text, primary_key=True),
    Column("since_position", BigInteger, primary_key=True),
    Column("until_position", BigInteger, nullable=False),
)

receiver_ends = Table(
    "receiver_ends",
    metadata,
    # Each end of a receiver, its first one being number 1: who ended it and why. One without `ended_at` is under way.
    Column("receiver", Text, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("reason", Text, nullable=False),
    Column("ended_by", Text, nullable=False),
    Column("begun_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
)

receivers = Table(
    "receivers",
    metadata,
    # Its row is the lock that keeps twins of one receiver apart.
    Column("receiver", Text, primary_key=True),
    Column("held_since", BigInteger),
    Column("reason", Text),
    Column("last_progress", BigInteger),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("receiver", Text, primary_key=True),
    Column("position", _Position, primary_key=True),
    Column("aggregate_id", Text, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column(
        "status",
        Text,
        _one_of("status", "pending", "retrying", "done", "dead", "waived"),
        nullable=False,
        server_default="pending",
    ),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("next_attempt_at", BigInteger),
    Column("last_error", Text),
    # 1 while a DeliveryWorkflow run was asked for: bounds how many are open, and shows which were lost.
    Column("has_run", Integer, nullable=False, server_default="0"),
    Column("settled_at", BigInteger),  # when it became dead or waived
    Column("reason", Text),  # why a person waived it
    Column("settled_by", Text),  # who waived it
    sqlite_with_rowid=False,
)
Index(
    "deliveries_pending",
    deliveries.c.receiver,
    deliveries.c.position,
    **_where("status = 'pending'"),
)
Index(
    "deliveries_blocking",
    deliveries.c.receiver,
    deliveries.c.aggregate_id,
    deliveries.c.seq,
    **_where("status IN ('retrying', 'dead')"),
)
Index(
    "deliveries_due",
    deliveries.c.receiver,
    deliveries.c.next_attempt_at,
    **_where("status = 'retrying'"),
)

# What a person looks through: few of many deliveries, in the order that they are listed in. The status comes first,
# or SQLite would take the primary key where a receiver is named, and read all that it was ever delivered.
Index(
    "deliveries_set_aside",
    deliveries.c.status,
    deliveries.c.receiver,
    deliveries.c.position,
    **_where("status IN ('dead', 'waived')"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("amount", BigInteger, CheckConstraint("amount >= 1"), nullable=False),
    Column(
        "state",
        Text,
        _one_of("state", "RUNNING", "COMPLETED", "FAILED"),
        nullable=False,
    ),
    Column("error", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("look_at", BigInteger, nullable=False),  # when the look next makes sure that it has a run
    _integer("amount"),
)
Index("jobs_running", jobs.c.look_at, **_where("state = 'RUNNING'"))

job_steps = Table(
    "job_steps",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("step", Text, _one_of("step", "charge", "ship"), primary_key=True),
    Column("position", BigInteger, nullable=False),  # 1 for charge, 2 for ship: the order of the work
    Column("completed_at", BigInteger, nullable=False),
)

charges = Table(
    "charges",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("amount", BigInteger, CheckConstraint("amount >= 1"), nullable=False),
    Column("charged_at", BigInteger, nullable=False),
    _integer("amount"),
)

shipments = Table(
    "shipments",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("shipped_at", BigInteger, nullable=False),
)

billing_entries = Table(
    "billing_entries",
    metadata,
    Column("position", _Position, primary_key=True, autoincrement=False),
    Column("order_id", Text, nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("currency", Text, nullable=False),
    _integer("amount"),
)

mail_messages = Table(
    "mail_messages",
    metadata,
    Column("position", _Position, primary_key=True, autoincrement=False),
    Column("order_id", Text, nullable=False),
    Column("subject", Text, nullable=False),
)

generations = Table(
    "generations",
    metadata,
    Column("generation", Text, primary_key=True),
    Column(
        "state",
        Text,
        _one_of("state", "BUILDING", "SEALED", "ACTIVE", "RETIRED", "FAILED"),
        nullable=False,
    ),
    Column("certificate", Text),
    Column("created_at", BigInteger, nullable=False),
    CheckConstraint(
        "state <> 'ACTIVE' OR certificate IS NOT NULL OR generation = 'initial'",
        name="active_needs_certificate",
    ),
)
Index("one_active_generation", generations.c.state, unique=True, **_where("state = 'ACTIVE'"))

sales_applied = Table(
    "sales_applied",
    metadata,
    Column("generation", Text, primary_key=True),
    Column("position", _Position, primary_key=True),
    Column("amount", BigInteger, nullable=False),
    Column("currency", Text, nullable=False),
    _integer("amount"),
    sqlite_with_rowid=False,
)

sales_totals = Table(
    "sales_totals",
    metadata,
    Column("generation", Text, primary_key=True),
    Column("currency", Text, primary_key=True),
    Column("orders", BigInteger, nullable=False),
    Column("amount", BigInteger, nullable=False),
    _integer("orders"),
    _integer("amount"),
    sqlite_with_rowid=False,
)

rebuilds = Table(
    "rebuilds",
    metadata,
    # A rebuild or a rollback, from its first transaction on. Rows are never removed: they number the generations.
    Column("rebuild_id", Text, primary_key=True),
    Column("run_id", Text, nullable=False, unique=True),  # of its workflow: beginning twice comes to one row
    Column("kind", Text, _one_of("kind", "rebuild", "rollback"), nullable=False),
    Column("state", Text, _one_of("state", "RUNNING", "COMPLETED", "FAILED"), nullable=False),
    Column("phase", Text, nullable=False),
    Column("generation", Text, nullable=False),
    Column("base_generation", Text, nullable=False),  # the active one that it replaces
    Column("epoch", BigInteger, nullable=False),
    Column("resume", Integer, nullable=False),  # 1: intake opens again when it is done
    Column("until_position", BigInteger),  # the last event of the history when it was found drained
    Column("expected", BigInteger, nullable=False, server_default="0"),
    Column("replayed", BigInteger, nullable=False, server_default="0"),
    Column("certificate", Text),
    Column("error", Text),
    Column("started_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
)
Index("one_running_rebuild", rebuilds.c.state, unique=True, **_where("state = 'RUNNING'"))

rebuild_expected = Table(
    "rebuild_expected",
    metadata,
    Column("rebuild_id", Text, primary_key=True),
    # In binary order on both databases: a digest that depends on a locale proves nothing elsewhere.
    Column("event_id", _BinaryText, primary_key=True),
    Column("amount", BigInteger, nullable=False),
    Column("currency", Text, nullable=False),
    _integer("amount"),
    sqlite_with_rowid=False,
)

redrives = Table(
    "redrives",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("filters", Text, nullable=False),  # canonical JSON: the same request with other filters is a conflict
    Column(
        "state",
        Text,
        _one_of("state", "RUNNING", "COMPLETED", "CANCELLED"),
        nullable=False,
    ),
    # Counted along with the items, so that progress need not count a hundred thousand rows each time.
    Column("total", BigInteger, nullable=False),
    Column("taken", BigInteger, nullable=False),
    Column("skipped", BigInteger, nullable=False),
    Column("note", Text),  # why it was cancelled
    Column("created_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
    Column("look_at", BigInteger, nullable=False),  # when the look next makes sure that it has a run
    CheckConstraint("taken + skipped <= total", name="within_the_frozen_set"),
)
Index("redrives_running", redrives.c.look_at, **_where("state = 'RUNNING'"))

redrive_items = Table(
    "redrive_items",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("position", _Position, primary_key=True),
    Column("receiver", Text, primary_key=True),
    Column("taken_at", BigInteger),  # set once; the item is not touched again, whatever becomes of the delivery
    Column("skipped", Integer, nullable=False, server_default="0"),  # 1: it was no dead letter any more
    sqlite_with_rowid=False,
)
Index(
    "redrive_items_waiting",
    redrive_items.c.request_id,
    redrive_items.c.position,
    redrive_items.c.receiver,
    **_where("taken_at IS NULL"),
)

control = Table(
    "control",
    metadata,
    Column("id", Integer, CheckConstraint("id = 1"), primary_key=True, autoincrement=False),
    Column("intake", Text, _one_of("intake", "OPEN", "PAUSED"), nullable=False),
    Column("paused_by", Text),
    Column("active_generation", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("hot_until", BigInteger, nullable=False),  # the relay drains until then, so intake need not wake it
)

invalid_entries = Table(
    "invalid_entries",
    metadata,
    Column("entry", Text, primary_key=True),  # as text; bytes that are none are shown escaped
    Column("reason", Text, nullable=False),
    Column("seen_at", BigInteger, nullable=False),
)

faults = Table(
    "faults",
    metadata,
    Column("receiver", Text, primary_key=True),
    Column("mode", Text, _one_of("mode", "error", "outage"), nullable=False),
)
