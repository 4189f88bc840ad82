"""Errors: one tree, each class an exit code and an audience.

A message says what is wrong, with which values, and what to do. Stale, duplicate and expired
are outcomes of an ordinary day and therefore enum values, never exceptions.
"""


class AntiphonError(Exception):
    """Root of every error this product raises on purpose; exit code 1."""

    exit_code: int = 1


class ConfigError(AntiphonError):
    """A configuration or a command line that is invalid; exit code 2."""

    exit_code = 2


class InfeasibleError(AntiphonError):
    """Numbers that nothing can be planned from, or a demand that nothing can meet; exit code 3."""

    exit_code = 3


class ContractError(AntiphonError):
    """A peer broke the contract: wrong protocol version, wrong run, malformed message."""


class RefusedError(ContractError):
    """What was handed in is not taken; the sender goes on with its other work."""


class IntegrityError(AntiphonError):
    """Bytes that do not match their digest, or a state that contradicts the journal."""


class UnavailableError(AntiphonError):
    """A peer that did not answer within the deadline; the only error worth a retry."""


class BlockedError(UnavailableError):
    """A peer that answers but can record nothing now: its disk is full, or its database is away."""


INTERRUPTED = "interrupted; the same command continues where it stopped"
"""What a command says that a signal ended; its exit code is 128 and the signal's number, 130 on Ctrl-C."""
COMPLAINT = "antiphon: "
"""Begins the sentence in which a command says what went wrong."""
