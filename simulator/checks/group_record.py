"""Group record: what the witness of a simulated run knows of one group."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class GroupRecord:
    """One group."""

    phase: str = "open"
    attempt: int = 0
    lease_id: str = ""
    twin_id: str = ""
    """Lease of a speculative duplicate."""
    oldest: int = 0
    digest: str = ""
    step: int | None = None
    evaluation: int | None = None
    """Version that its held-out prompt scores."""
    rewards: tuple[float, ...] = ()
    failed: dict[int, str] = field(default_factory=dict)
    stale: bool = False
    """It was dropped for its age."""
