"""What a command may fail with, and the one sentence that a person reads then."""

from embedded import EmbeddedError
from pipeline import sentences
from pipeline.sentences import sentence

__all__ = ["FAILURES", "sentence"]

FAILURES = (*sentences.FAILURES, EmbeddedError)
