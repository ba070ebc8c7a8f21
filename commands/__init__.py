"""The command line's commands, one concern a file; starter.py is the front. Each module has `add(commands)`."""
