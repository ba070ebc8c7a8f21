"""The worker as it is, with the drill's receivers beside the built-in ones: `python -m tests.faults.drill_worker`."""

import worker
from receivers.registry import RECEIVERS
from tests.faults.receivers import DRILL_RECEIVERS

if __name__ == "__main__":
    worker.end(worker.main((*RECEIVERS, *DRILL_RECEIVERS)))
