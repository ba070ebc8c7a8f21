"""What can go wrong with the embedded servers. Every message is one sentence that a person can act
on.

EmbeddedError
└── AlreadyRunning
"""


class EmbeddedError(Exception):
    """An embedded server cannot be started, or did not answer in time."""


class AlreadyRunning(EmbeddedError):
    """Another live guard holds this home; its servers are in use."""
