"""The names that processes meet each other by: task queues, workflow ids, signals, Redis keys."""

# Drains last about a minute each; on a queue of their own they starve no short activity (mechanism 4).
TASK_QUEUE = "saisei"
DRAIN_TASK_QUEUE = "saisei-drain"

RELAY_ID = "relay"
FAN_OUT_ID = "fan-out"
REBUILD_ID = "rebuild/sales"  # rebuilds and rollbacks: one at a time
WAKE_SIGNAL = "wake"
PROCEED_SIGNAL = "proceed"

OUTBOX_LIST = "outbox.events"
PROCESSED_HASH = "processed"
PROCESSED_PREVIOUS = "processed.previous"
NO_LIST = "outbox.nothing"  # there never is one: a push onto it asks the server whether it takes pushes

REDRIVE_RUNNING, REDRIVE_COMPLETED, REDRIVE_CANCELLED = "RUNNING", "COMPLETED", "CANCELLED"

CHARGE = "charge"
SHIP = "ship"


def receiver_id(receiver: str) -> str:
    """Workflow id of a receiver's singleton, also its stage name within a worker."""
    return f"receiver/{receiver}"


def receiver_of(stage: str) -> str | None:
    """The receiver whose singleton `receiver_id` names so, or None for another stage."""
    name = stage.removeprefix(receiver_id(""))
    return None if name == stage else name


def delivery_id(receiver: str, event_id: str) -> str:
    """Workflow id of the run that retries one event at one receiver."""
    return f"delivery/{receiver}/{event_id}"


def redrive_id(request_id: str) -> str:
    """Workflow id of the run that makes one request's dead letters pending again."""
    return f"redrive/{request_id}"


def job_workflow_id(job_id: str) -> str:
    """Workflow id of a `charge` -> `ship` job."""
    return f"job/{job_id}"
