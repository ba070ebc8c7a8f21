"""Benchmarks: each is measured against a floor in the same run and printed as a ratio. `python -m bench --help`."""
