"""Which chunks are asked of whom: patience that no source can draw out."""

import numpy as np

from antiphon.core.dissemination.plan import ORIGIN, Assignment
from antiphon.core.dissemination.requests import Transfer


def _transfer(*parents: str, chunks: int = 4, chunk_bytes: int = 4 << 20, rate: float = 1e6) -> Transfer:
    assignment = Assignment((*parents, ORIGIN), (), 1 + len(parents), rate)
    return Transfer(np.zeros(chunks, np.bool_), chunk_bytes, assignment, {}, 0.0)


def test_a_source_may_fail_any_number_of_times() -> None:
    transfer = _transfer("relay-1")
    for time_s in range(2000):
        transfer.failed("relay-1", float(time_s))
    assert transfer.sources["relay-1"].retry_at_s == 1999 + 8.0
