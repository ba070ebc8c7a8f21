"""How many events a receiver is given at a time, so that those it fails for are found in few attempts."""


class Pieces:
    """The sizes of the pieces that a sequence of events is tried in; tell it what became of each.

    All at first. One that fails among many is looked for where the receiver stopped, then by halves. Nothing is known
    of what follows one that failed alone: it is tried as a whole if the receiver stops by itself at what it fails for,
    else in stretches as long as those that went well before.
    """

    def __init__(self, events: int) -> None:
        self._all = self._stretch = events
        self._among = 0  # so many of the next ones are known to hold one that fails
        self._stop: int | None = None  # so many of these come before the one that the receiver stopped at
        self._passed = self._failed = 0

    @property
    def size(self) -> int:
        """Of the next piece; fewer may be left."""
        if self._stop is not None:
            return self._stop or 1
        return max(self._among // 2, 1) if self._among else self._stretch

    def went_well(self, events: int) -> None:
        """A piece of so many."""
        self._passed += events
        if self._among:
            self._among -= events
            self._stop = self._stop - events if self._stop else None  # where it stopped is not where it fails
        else:
            self._stretch *= 2

    def failed(self, events: int, stopped_at: int | None) -> None:
        """A piece of so many, more than one. `stopped_at`: how many of them the receiver had gone through when it
        stopped, if that can be told. It may mislead, so it is followed once for each that fails."""
        self._stop = None if self._among else stopped_at
        self._among = events

    def failed_alone(self) -> None:
        """A piece of one."""
        self._passed += 1
        self._failed += 1
        self._stretch = self._all if self._stop == 0 else self._passed // self._failed
        self._among, self._stop = 0, None
