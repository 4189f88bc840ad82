"""Voided batch: a sealed batch that an operator took back before its step was committed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VoidedBatch:
    """What is kept of a batch that was never trained; another one stands in its place."""

    step: int
    digest: str
    """Of the file that the step would have used, 64 hex digits."""
    groups: int
    """Groups in the file: spent, and never trained."""
    groups_filtered: int
    """Groups without variance that were left out of the file, and are spent too."""
    trajectories: int
    """Of the file."""
    reason: str
    operator: str
    """Who voided it, as they said."""
