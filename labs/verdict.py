"""What a walk-through comes to: `ok`, or `bad` with the sentences that say what was wrong."""

from dataclasses import dataclass, field

from contracts.errors import SaiseiError


class LabFailed(SaiseiError):
    """A step of a walk-through came to no end, or failed in a way that it does not foresee."""


@dataclass
class Verdict:
    """Collects what did not hold. `reason` is a short sentence for a good outcome; `counts` what was counted."""

    name: str
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def require(self, holds: bool, problem: str) -> None:
        """Note `problem`, a sentence, unless `holds`."""
        if not holds:
            self.problems.append(problem)

    @property
    def ok(self) -> bool:
        """Whether everything held."""
        return not self.problems

    @property
    def word(self) -> str:
        """`ok` or `bad`."""
        return "ok" if self.ok else "bad"

    @property
    def sentence(self) -> str:
        """Why: the reason, or the first thing that did not hold."""
        return self.reason if self.ok else self.problems[0]
