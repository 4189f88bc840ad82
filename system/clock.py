"""Clock: the time of day, which is only ever shown and never decides."""

from datetime import UTC, datetime


def wall_clock() -> float:
    """Return Unix seconds: for display, and for what expires."""
    return datetime.now(UTC).timestamp()
