"""Door keys: what clients of the front door show, and where a home keeps what it is checked by."""

from pathlib import Path

PREFIX = "tml-"
"""Begins every key: clients take no other."""
KEY = Path("door") / "key"
"""What a client on the door's machine shows; within the home."""
BARRED = Path("door") / "barred"
"""Names and ids of keys that count no more, one a line; within the home."""
