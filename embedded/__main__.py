"""`python -m embedded guard --home FOLDER`: what `start` runs; not meant to be typed."""

import argparse
import sys
from pathlib import Path

from embedded._guard import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m embedded", description=__doc__)
    parser.add_argument("command", choices=["guard"])
    parser.add_argument("--home", type=Path, required=True, help="the folder of all data")
    sys.exit(main(parser.parse_args().home))
