"""The worker as it is, with the drill's receivers beside the built-in ones: `python -m tests.faults.drill_worker`.

With DRILL_PICKY in the environment also the receiver that fails for poisoned orders.
"""

import os

import worker
from config import end
from receivers.registry import RECEIVERS
from tests.faults.receivers import DRILL_RECEIVERS, PICKY, Picky

if __name__ == "__main__":
    more = (Picky(PICKY),) if "DRILL_PICKY" in os.environ else ()
    end(worker.main((*RECEIVERS, *DRILL_RECEIVERS, *more)))
