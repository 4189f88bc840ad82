"""Outcome: what one simulated run came to."""

from dataclasses import dataclass

from antiphon.simulator.faults import Fault


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one simulated run came to."""

    seed: int
    violations: tuple[str, ...]
    digest: str
    """blake3 of the journal; the same seed gives the same."""
    weights: tuple[str, ...]
    """Weights digest of each committed step."""
    batches: tuple[str, ...]
    """Digest of each sealed batch."""
    events: int
    """Events of the journal."""
    steps: int
    """Callbacks of the event loop."""
    messages: int
    virtual_s: float
    faults: tuple[Fault, ...]
    restarts: int
    recovery_s: float | None
    """Seconds from the last fault to the next commit; None when nothing was left to commit."""
    parties: tuple[str, ...]
    """Kinds of processes and people that took part."""
    shut_out: tuple[str, ...]
    """Workers that ended in quarantine."""
    edited: int
    """Groups that trained with a token that a worker had changed and no audit had found yet."""
