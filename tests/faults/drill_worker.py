"""The worker as it is, with the drill's receivers beside the built-in ones: `python -m tests.faults.drill_worker`.

With DRILL_PICKY in the environment also the receiver that fails for poisoned orders. With DRILL_DIES it kills itself
right before or right after it starts the run of a failing event.
"""

import os
import signal
from typing import Any

import worker
from config import end
from contracts.messages import DeliveryInput
from receivers.registry import RECEIVERS
from runs.starts import Runs
from tests.faults.receivers import DRILL_RECEIVERS, PICKY, Picky

DIES = "DRILL_DIES"


class Mortal(Runs):
    """Its process does not outlive the start of a failing event's run."""

    async def start_delivery(self, message: DeliveryInput) -> Any:
        if os.environ[DIES] == "after":
            await super().start_delivery(message)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if DIES in os.environ:
        worker.Runs = Mortal  # type: ignore[misc]
    more = (Picky(PICKY),) if "DRILL_PICKY" in os.environ else ()
    end(worker.main((*RECEIVERS, *DRILL_RECEIVERS, *more)))
