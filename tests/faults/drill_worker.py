"""The worker as it is, with the drill's receivers beside the built-in ones: `python -m tests.faults.drill_worker`."""

import sys

import worker
from receivers.registry import RECEIVERS
from tests.faults.receivers import DRILL_RECEIVERS

if __name__ == "__main__":
    sys.exit(worker.main((*RECEIVERS, *DRILL_RECEIVERS)))
