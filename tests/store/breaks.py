"""One row, or two, as no code of ours writes them, and how the audit names each: a shop of ten orders and two jobs."""

from contracts.events import ORDER_PLACED
from store.engine import Database


def surgery(database: Database, *statements: str) -> None:
    """What no code of ours would write."""
    with database.write() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


# What is broken; the hand that breaks it; invariant and sentence -> the ids that are named. The orders' events stand at
# the positions 1 to 10, those of the jobs at 11 and 12 (job-1) and 13 (job-2, which is not shipped).
BREAKS: list[tuple[str, list[str], dict[str, tuple[str, ...]]]] = [
    (
        "an order without its event",
        ["INSERT INTO orders VALUES ('order-99', 's', 1, 100, 'JPY', 1)"],
        {"I1 orders without their event": ("order-99",)},
    ),
    (
        "an event without its order",
        ["DELETE FROM orders WHERE id = 'order-3'"],
        {f"I1 {ORDER_PLACED} events without their order": ("order-3:placed",)},
    ),
    (
        "an order and an event that are each alone",
        [
            "DELETE FROM orders WHERE id = 'order-3'",
            "INSERT INTO orders VALUES ('order-03', 's', 1, 300, 'JPY', 1)",
        ],
        {
            "I1 orders without their event": ("order-03",),
            f"I1 {ORDER_PLACED} events without their order": ("order-3:placed",),
        },
    ),
    (
        "a delivery that is lost",
        [
            "DELETE FROM deliveries WHERE receiver = 'mail' AND position = 4",
            "DELETE FROM mail_messages WHERE position = 4",
        ],
        {"I2 events lost at mail: fanned out, and without a delivery": ("order-4:placed",)},
    ),
    (
        "a delivery of nothing",
        ["INSERT INTO deliveries (receiver, position, aggregate_id, seq) VALUES ('mail', 777, 'a', 1)"],
        {"I2 deliveries to mail of no event that it takes": ("position 777",)},
    ),
    (
        "a delivery of a type that it does not take",
        ["INSERT INTO deliveries (receiver, position, aggregate_id, seq) VALUES ('mail', 11, 'job/job-1', 1)"],
        {"I2 deliveries to mail of no event that it takes": ("job-1:payment-captured",)},
    ),
    (
        "a delivery to nobody",
        ["INSERT INTO deliveries (receiver, position, aggregate_id, seq) VALUES ('ghost', 1, 'order/order-1', 1)"],
        {"I2 deliveries to ghost of no event that it takes": ("order-1:placed",)},
    ),
    (
        "one delivery lost and one too many",
        [
            "DELETE FROM deliveries WHERE receiver = 'mail' AND position = 4",
            "DELETE FROM mail_messages WHERE position = 4",
            "INSERT INTO deliveries (receiver, position, aggregate_id, seq) VALUES ('mail', 777, 'a', 1)",
        ],
        {
            "I2 events lost at mail: fanned out, and without a delivery": ("order-4:placed",),
            "I2 deliveries to mail of no event that it takes": ("position 777",),
        },
    ),
    (
        "done without an effect",
        ["DELETE FROM billing_entries WHERE position = 2"],
        {"I3 deliveries done at billing without an effect": ("order-2:placed",)},
    ),
    (
        "an effect without done",
        ["UPDATE deliveries SET status = 'pending' WHERE receiver = 'mail' AND position = 2"],
        {"I3 effects of mail without a delivery that is done": ("order-2:placed",)},
    ),
    (
        "an effect of nothing",
        ["INSERT INTO mail_messages VALUES (888, 'order-888', 'x')"],
        {"I3 effects of mail without a delivery that is done": ("position 888",)},
    ),
    (
        "an effect of another order",
        ["UPDATE billing_entries SET order_id = 'order-3' WHERE position = 2"],
        {"I3 effects of billing of another order than their event": ("order-2:placed",)},
    ),
    (
        "two effects that changed their orders",
        [
            "UPDATE mail_messages SET order_id = 'order-5' WHERE position = 4",
            "UPDATE mail_messages SET order_id = 'order-4' WHERE position = 5",
        ],
        {"I3 effects of mail of another order than their event": ("order-4:placed", "order-5:placed")},
    ),
    (
        "a charge of another amount",
        ["UPDATE charges SET amount = 99 WHERE job_id = 'job-1'"],
        {"I5 charges of another amount than their job's": ("job-1",)},
    ),
    (
        "a charge of nobody",
        ["INSERT INTO charges VALUES ('job-9', 100, 1)"],
        {"I5 charges without a job that records them": ("job-9",)},
    ),
    (
        "a shipment that is not recorded",
        ["INSERT INTO shipments VALUES ('job-2', 1)"],
        {"I5 shipments without a job that records them": ("job-2",)},
    ),
    (
        "shipped and not charged",
        [
            "DELETE FROM job_steps WHERE job_id = 'job-1' AND step = 'charge'",
            "DELETE FROM charges WHERE job_id = 'job-1'",
        ],
        {
            "I5 jobs shipped and not charged": ("job-1",),
            "I5 payment-captured events of no job's step charge": ("job-1:payment-captured",),
        },
    ),
    (
        "steps of no job",
        ["INSERT INTO job_steps VALUES ('job-9', 'charge', 1, 1)"],
        {
            "I5 steps of no job": ("job-9",),
            "I5 jobs whose step charge has no payment-captured event": ("job-9",),
        },
    ),
    (
        "no active generation",
        ["UPDATE generations SET state = 'RETIRED'"],
        {"I6 generations ACTIVE, where initial is the one named as active": ()},
    ),
    (
        "two active generations",
        [
            "DROP INDEX one_active_generation",
            "INSERT INTO generations VALUES ('generation-1', 'ACTIVE', '{}', 1)",
        ],
        {
            "I6 generations ACTIVE, where initial is the one named as active": ("generation-1", "initial"),
            "I6 generations ACTIVE that no rebuild switched to": ("generation-1",),
        },
    ),
    (
        "totals that are not the sum",
        ["UPDATE sales_totals SET amount = amount + 1"],
        {
            "I6 currencies whose totals in initial are not the sum of its rows": (
                "JPY (rows 10 orders, 5,500, totals 10 orders, 5,501)",
            )
        },
    ),
    (
        "totals of a currency that nobody paid in",
        ["INSERT INTO sales_totals VALUES ('initial', 'EUR', 1, 1)"],
        {
            "I6 currencies whose totals in initial are not the sum of its rows": (
                "EUR (rows nothing, totals 1 order, 1)",
            )
        },
    ),
    (
        "done at sales and not in the generation",
        [
            "DELETE FROM sales_applied WHERE position = 7",
            "UPDATE sales_totals SET amount = amount - 700, orders = orders - 1",
        ],
        {"I6 events done at sales that initial lacks": ("order-7:placed",)},
    ),
    (
        "a row that the history does not have",
        [
            "INSERT INTO sales_applied VALUES ('initial', 999, 1, 'JPY')",
            "UPDATE sales_totals SET amount = amount + 1, orders = orders + 1",
        ],
        {"I6 rows of initial that the history does not have": ("position 999",)},
    ),
    (
        "one row for another, right in count and sum",
        [
            "UPDATE sales_applied SET position = 999 WHERE position = 7",
        ],
        {
            "I6 events done at sales that initial lacks": ("order-7:placed",),
            "I6 rows of initial that the history does not have": ("position 999",),
        },
    ),
    (
        "another amount, and totals that agree with it",
        [
            "UPDATE sales_applied SET amount = 701 WHERE position = 7",
            "UPDATE sales_totals SET amount = amount + 1",
        ],
        {"I6 rows of initial with another amount than their event": ("order-7:placed",)},
    ),
    (
        "two amounts that changed places",
        [
            "UPDATE sales_applied SET amount = 1500 - amount WHERE position IN (7, 8)",
        ],
        {"I6 rows of initial with another amount than their event": ("order-7:placed", "order-8:placed")},
    ),
    (
        "another currency",
        [
            "UPDATE sales_applied SET currency = 'EUR' WHERE position = 7",
            "UPDATE sales_totals SET amount = amount - 700, orders = orders - 1",
            "INSERT INTO sales_totals VALUES ('initial', 'EUR', 1, 700)",
        ],
        {"I6 rows of initial with another amount than their event": ("order-7:placed",)},
    ),
    (
        "an order of another amount than its event",
        ["UPDATE orders SET amount = 5 WHERE id = 'order-7'"],
        {"I1 orders of which their event says something else": ("order-7",)},
    ),
    (
        "an order of which its event says another sku",
        ["UPDATE orders SET sku = 'x' WHERE id = 'order-7'"],
        {"I1 orders of which their event says something else": ("order-7",)},
    ),
    (
        "two orders whose amounts changed places",
        ["UPDATE orders SET amount = 1500 - amount WHERE id IN ('order-7', 'order-8')"],
        {"I1 orders of which their event says something else": ("order-7", "order-8")},
    ),
    (
        "an event of another aggregate than its order's",
        ["UPDATE outbox SET aggregate_id = 'order/x' WHERE position = 7"],
        {"I1 orders of which their event says something else": ("order-7",)},
    ),
    (
        "subscribed and not registered",
        ["DELETE FROM receivers WHERE receiver = 'mail'"],
        {"I2 receivers that are subscribed and not registered: nobody drains them": ("mail",)},
    ),
    (
        "pushed nobody knows when",
        ["UPDATE outbox SET fanned_out_at = NULL, published_at = NULL WHERE position = 13"],
        {"I2 events in Redis of no known push: nobody would find them lost": ("job-2:payment-captured",)},
    ),
    (
        "retried nobody knows when",
        [
            "UPDATE deliveries SET status = 'retrying' WHERE receiver = 'mail' AND position = 2",
            "DELETE FROM mail_messages WHERE position = 2",
        ],
        {
            "I2 events retrying without a time of their next attempt: nobody would find their run lost": (
                "order-2:placed",
            )
        },
    ),
    (
        "waived by nobody",
        [
            "UPDATE deliveries SET status = 'waived', reason = 'x', settled_at = 1 "
            "WHERE receiver = 'mail' AND position = 2",
            "DELETE FROM mail_messages WHERE position = 2",
        ],
        {"I2 events waived without who did it, when and why": ("order-2:placed",)},
    ),
    (
        "a redrive that counts otherwise than its items",
        ["INSERT INTO redrives VALUES ('r', '{}', 'COMPLETED', 1, 1, 0, NULL, 1, 2, 3)"],
        {"I2 redrives whose counts are not those of their items": ("r",)},
    ),
    (
        "a redrive that ended too early",
        [
            "INSERT INTO redrives VALUES ('r', '{}', 'COMPLETED', 1, 0, 0, NULL, 1, 2, 3)",
            "INSERT INTO redrive_items VALUES ('r', 1, 'mail', NULL, 0)",
        ],
        {"I2 redrives that have ended with items left, or not ended with none": ("r",)},
    ),
    (
        "a redrive that did not end",
        [
            "INSERT INTO redrives VALUES ('r', '{}', 'RUNNING', 1, 1, 0, NULL, 1, NULL, 3)",
            "INSERT INTO redrive_items VALUES ('r', 1, 'mail', 2, 0)",
        ],
        {"I2 redrives that have ended with items left, or not ended with none": ("r",)},
    ),
    (
        "items of no redrive",
        ["INSERT INTO redrive_items VALUES ('r', 1, 'mail', NULL, 0)"],
        {"I2 items of no redrive": ("r",)},
    ),
    (
        "an effect of a delivery of nothing",
        [
            "INSERT INTO deliveries (receiver, position, aggregate_id, seq, status) "
            "VALUES ('mail', 777, 'a', 1, 'done')",
            "INSERT INTO mail_messages VALUES (777, 'order-777', 'x')",
        ],
        {
            "I2 deliveries to mail of no event that it takes": ("position 777",),
            "I3 effects of mail of no event": ("position 777",),
        },
    ),
    (
        "a bill of another amount",
        ["UPDATE billing_entries SET amount = amount + 1 WHERE position = 7"],
        {"I3 effects of billing with another amount than their event": ("order-7:placed",)},
    ),
    (
        "two bills whose amounts changed places",
        ["UPDATE billing_entries SET amount = 1500 - amount WHERE position IN (7, 8)"],
        {"I3 effects of billing with another amount than their event": ("order-7:placed", "order-8:placed")},
    ),
    (
        "a bill in another currency",
        ["UPDATE billing_entries SET currency = 'EUR' WHERE position = 7"],
        {"I3 effects of billing with another amount than their event": ("order-7:placed",)},
    ),
    (
        "an event without the one before it",
        ["UPDATE outbox SET seq = 3 WHERE position = 12"],
        {"I4 events without the one before them in their aggregate, or recorded before it": ("job-1:order-shipped",)},
    ),
    (
        "two events recorded in the wrong order",
        [
            "UPDATE outbox SET seq = 9 WHERE position = 11",
            "UPDATE outbox SET seq = 1 WHERE position = 12",
            "UPDATE outbox SET seq = 2 WHERE position = 11",
        ],
        {
            "I4 events without the one before them in their aggregate, or recorded before it": (
                "job-1:payment-captured",
            )
        },
    ),
    (
        "a delivery under another number than its event's",
        [
            "UPDATE deliveries SET status = 'pending', seq = 5 WHERE receiver = 'mail' AND position = 2",
            "DELETE FROM mail_messages WHERE position = 2",
        ],
        {"I4 deliveries pending under another aggregate or number than their event's": ("order-2:placed",)},
    ),
    (
        "a delivery under another aggregate than its event's",
        [
            "UPDATE deliveries SET status = 'dead', aggregate_id = 'a' WHERE receiver = 'mail' AND position = 2",
            "DELETE FROM mail_messages WHERE position = 2",
        ],
        {"I4 deliveries dead under another aggregate or number than their event's": ("order-2:placed",)},
    ),
    (
        "completed and not shipped",
        ["UPDATE jobs SET state = 'COMPLETED' WHERE job_id = 'job-2'"],
        {"I5 jobs COMPLETED and not shipped": ("job-2",)},
    ),
    (
        "a step that nobody was told of",
        ["DELETE FROM outbox WHERE event_id = 'job-1:order-shipped'"],
        {"I5 jobs whose step ship has no order-shipped event": ("job-1",)},
    ),
    (
        "a charge that was told of and is not there",
        ["DELETE FROM job_steps WHERE job_id = 'job-2'", "DELETE FROM charges WHERE job_id = 'job-2'"],
        {"I5 payment-captured events of no job's step charge": ("job-2:payment-captured",)},
    ),
    (
        "a row of a delivery of nothing",
        [
            "INSERT INTO deliveries (receiver, position, aggregate_id, seq, status) "
            "VALUES ('sales', 777, 'a', 1, 'done')",
            "INSERT INTO sales_applied VALUES ('initial', 777, 1, 'JPY')",
            "UPDATE sales_totals SET amount = amount + 1, orders = orders + 1",
        ],
        {
            "I2 deliveries to sales of no event that it takes": ("position 777",),
            "I6 rows of initial that the history does not have": ("position 777",),
        },
    ),
    (
        "a row of an event that sales has still to take",
        ["UPDATE deliveries SET status = 'pending' WHERE receiver = 'sales' AND position = 7"],
        {"I6 rows of initial that are neither done at sales nor rebuilt": ("order-7:placed",)},
    ),
    (
        "a row of an event that is still on its way",
        [
            "UPDATE outbox SET fanned_out_at = NULL WHERE position = 7",
            "DELETE FROM deliveries WHERE position = 7",
            "DELETE FROM billing_entries WHERE position = 7",
            "DELETE FROM mail_messages WHERE position = 7",
        ],
        {"I6 rows of initial that are neither done at sales nor rebuilt": ("order-7:placed",)},
    ),
    (
        "rows of a generation that there is not",
        ["INSERT INTO sales_applied VALUES ('ghost', 1, 100, 'JPY')"],
        {"I6 rows of no generation": ("ghost",)},
    ),
    (
        "totals of a generation that there is not",
        ["INSERT INTO sales_totals VALUES ('ghost', 'JPY', 1, 100)"],
        {"I6 totals of no generation": ("ghost",)},
    ),
    (
        "a retired generation whose totals are not its sum",
        [
            "INSERT INTO generations VALUES ('old', 'RETIRED', NULL, 1)",
            "INSERT INTO sales_applied VALUES ('old', 1, 100, 'JPY')",
        ],
        {"I6 currencies whose totals in old are not the sum of its rows": ("JPY",)},
    ),
    (
        "a generation that nobody builds",
        ["INSERT INTO generations VALUES ('new', 'BUILDING', NULL, 1)"],
        {"I6 generations being built by nobody": ("new",)},
    ),
    (
        "an active generation that nobody built",
        [
            "UPDATE generations SET generation = 'new', certificate = '{}'",
            "UPDATE control SET active_generation = 'new'",
            "UPDATE sales_applied SET generation = 'new'",
            "UPDATE sales_totals SET generation = 'new'",
        ],
        {"I6 generations ACTIVE that no rebuild switched to": ("new",)},
    ),
    (
        "a rebuild beside open intake",
        [
            "INSERT INTO rebuilds (rebuild_id, run_id, kind, state, phase, generation, base_generation, epoch, resume, "
            "started_at) VALUES ('rebuild-1', 'r', 'rebuild', 'RUNNING', 'p', 'new', 'initial', 1, 0, 1)",
        ],
        {"I6 rebuilds RUNNING without intake paused in their name since": ("rebuild-1",)},
    ),
    (
        "an expected set of no rebuild",
        ["INSERT INTO rebuild_expected VALUES ('rebuild-9', 'order-1:placed', 100, 'JPY')"],
        {"I6 expected sets of no rebuild": ("rebuild-9",)},
    ),
]
