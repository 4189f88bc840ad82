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


def test_bytes_that_drip_or_come_again_are_no_progress_and_a_slow_link_is() -> None:
    dripping, slow, again = (_transfer(chunk_bytes=16 << 20) for _ in range(3))
    for second in range(1, 1000):
        dripping.bytes_came(ORIGIN, 1, float(second), 0, second)
        slow.bytes_came(ORIGIN, 5000, float(second), 0, 5000 * second)
        again.bytes_came(ORIGIN, 50_000, float(second), 0, 50_000)
    assert dripping.last_progress_s < 1
    assert slow.last_progress_s > 990
    assert again.last_progress_s <= 1


def test_a_kept_chunk_is_progress_once() -> None:
    transfer = _transfer(chunk_bytes=10)
    (request, *_) = transfer.next_requests(0.0)
    for time_s in (400.0, 500.0):
        transfer.bytes_came(ORIGIN, 10, time_s, 0, 10)
        transfer.arrived(request, 0)
    assert transfer.last_progress_s == 400.0


def test_what_a_slow_origin_is_sending_is_kept_while_others_are_asked() -> None:
    transfer = _transfer("relay-1", chunks=1)
    first = transfer.next_requests(0.0)
    assert [request.source for request in first] == ["relay-1"]
    assert transfer.stalled(20.0) == ["relay-1"]  # and its request is hung up
    transfer.ended(first[0])
    (request,) = [r for r in transfer.next_requests(20.0) if r.source == ORIGIN]
    assert transfer.stalled(60.0) == [] and not transfer.all_failing()
    assert transfer.stalled(20.0 + 200.0) == [ORIGIN]  # in the end it is asked again, with more patience
    transfer.ended(request)
    assert not transfer.all_failing()  # a slow link is no refusal
    assert transfer.sources[ORIGIN].stalls == 1


def test_a_neighbour_brings_what_it_holds_although_the_first_chunks_are_not_among_it() -> None:
    chunks, length = 2000, 1 << 20
    transfer = Transfer(
        np.zeros(chunks, np.bool_), length, Assignment((ORIGIN,), ("near",), 1, 12.5e6), {}, 0.0
    )
    now, came = 0.0, set[int]()
    while len(came) < chunks // 2 and now < 60.0:
        for request in transfer.next_requests(now):
            if request.source == ORIGIN:  # it is gone
                transfer.failed(ORIGIN, now)
            else:
                held = [index for index in request.indices if index >= chunks // 2]
                for index in held:
                    transfer.bytes_came("near", length, now, index, length)
                    transfer.arrived(request, index)
                came.update(held)
                if len(held) < len(request.indices):
                    transfer.failed("near", now)
            transfer.ended(request)
        now += max(0.01, transfer.retry_s(now))
    assert len(came) == chunks // 2
