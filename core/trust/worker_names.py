"""Worker names: what a worker may be called, and the name within its id."""

import re

WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What a worker may be called; also the name in its certificate."""


def name_of_worker(worker_id: str) -> str:
    """Return the name within a worker's id: its registrations are numbered.

    >>> name_of_worker("far-east-3")
    'far-east'
    """
    return worker_id.rpartition("-")[0]
