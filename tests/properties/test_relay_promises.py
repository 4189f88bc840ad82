"""Relay under faults, in virtual time: never a wrong byte, everyone finishes, culprits are named."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from antiphon.core.dissemination.plan import ORIGIN, Assignment, Link, Plan, Size, Tree, tree_seconds
from antiphon.core.dissemination.reports import DeliveryRecord
from tests.support.virtual_peers import NEVER, Faults, Swarm, make_swarm, publish, virtual_loop

CHUNK_BYTES = 100
CHUNKS = 40
BYTES_PER_S = 1000.0
LINK = Link(BYTES_PER_S, 1e6, 0.02)
SIZE = Size(CHUNK_BYTES * CHUNKS - 37, CHUNK_BYTES)

_BAD = st.builds(
    Faults,
    kind=st.sampled_from(["corrupt", "truncate", "oversize", "reorder", "repeat", "boast", "refuse"]),
    every=st.integers(1, 12),
)
_BROKEN = st.one_of(
    st.builds(Faults, cut_bytes=st.integers(0, 900).map(float)),
    st.builds(Faults, slow=st.floats(2.0, 40.0)),
    st.builds(Faults, away=st.tuples(st.floats(0.0, 6.0), st.just(NEVER))),
    st.builds(Faults, hangs=st.tuples(st.floats(0.0, 6.0), st.just(NEVER))),
    st.builds(lambda at, long: Faults(away=(at, at + long)), st.floats(0.0, 5.0), st.floats(0.5, 20.0)),
)
_TOPOLOGIES = st.sampled_from(["star", "chain", "tree"])


def _plan(workers: int, topology: Any) -> Plan:
    tree, names = Tree(SIZE), [f"w{number}" for number in range(workers)]
    for number, name in enumerate(names):
        above = {"star": -1, "chain": number - 1, "tree": number // 2 - 1 if number > 1 else -1}[topology]
        tree.add([name], {name: LINK, (names[above] if above >= 0 else ORIGIN): LINK})
    return Plan(
        tree_seconds(SIZE, tree.parents, dict.fromkeys([*names, ORIGIN], LINK))[names[-1]][0],
        {name: tree.assignment(name, names) for name in names},
    )


def _run(swarm: Swarm, plan: Plan, bodies: list[bytes]) -> list[dict[str, DeliveryRecord]]:
    """Bring each body to every worker, all at once; every byte that anyone holds then is right."""

    async def everything() -> list[dict[str, DeliveryRecord]]:
        payloads = [publish(swarm, body, CHUNK_BYTES) for body in bodies]
        calls = [
            [asyncio.create_task(swarm.fetch(worker, payload, plan)) for worker in plan.assignments]
            for payload in payloads
        ]
        found = [dict(zip(plan.assignments, await asyncio.gather(*tasks), strict=True)) for tasks in calls]
        for payload, body in zip(payloads, bodies, strict=True):
            for name in plan.assignments:
                incoming = swarm.peers[name].store.incoming[payload.digest]
                assert bytes(incoming.body) == body
                assert incoming.writes == len(payload.chunk_digests)  # none was begun again
        return found

    loop = virtual_loop()
    found = loop.run(everything())
    assert not loop.complaints
    return found


def _body(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(SIZE.payload_bytes)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 7),
    _TOPOLOGIES,
    st.dictionaries(st.integers(0, 6), st.one_of(_BAD, _BROKEN), max_size=4),
    st.integers(1, 2),
)
@example(2, "tree", {0: Faults(kind="truncate", every=1)}, 1)
@example(2, "chain", {0: Faults(kind="reorder", every=1)}, 1)
def test_with_an_origin_everyone_finishes_whatever_the_others_do(
    workers: int, topology: Any, faults: dict[int, Faults], versions: int
) -> None:
    plan = _plan(workers, topology)
    named = {f"w{number}": fault for number, fault in faults.items() if number < workers}
    uplinks = {ORIGIN: BYTES_PER_S, **dict.fromkeys(plan.assignments, BYTES_PER_S)}
    swarm = make_swarm(uplinks, named)
    deliveries = _run(swarm, plan, [_body(seed) for seed in range(versions)])
    for delivered in deliveries:
        for delivery in delivered.values():
            # Who is named sent something wrong, and everyone who sent this worker something wrong is named.
            assert all(named[name].lies for name in delivery.culprits)
    for worker in plan.assignments:
        for name in swarm.peers[worker].culprits:
            assert swarm.peers[name].sent_wrong
    for name, peer in swarm.peers.items():
        if peer.sent_wrong:
            assert any(name in other.culprits for other in swarm.peers.values())


@settings(max_examples=12, deadline=None)
@given(st.integers(3, 7), st.floats(1.0, 4.0), st.one_of(st.just(NEVER), st.floats(1.0, 30.0)))
def test_when_the_origin_goes_the_workers_finish_from_each_other_or_wait_for_it(
    workers: int, at_s: float, for_s: float
) -> None:
    plan = _plan(workers, "chain")
    uplinks = {ORIGIN: BYTES_PER_S, **dict.fromkeys(plan.assignments, BYTES_PER_S)}
    whole_s = SIZE.payload_bytes / BYTES_PER_S
    if for_s == NEVER:
        at_s = whole_s + 1.0  # the first worker has everything, and no one else
        first = next(iter(plan.assignments))
        swarm = make_swarm(uplinks, {ORIGIN: Faults(away=(at_s, NEVER))})
        for name in list(plan.assignments)[1:]:
            assert first in (*plan.assignments[name].parents, *plan.assignments[name].others)
    else:
        swarm = make_swarm(uplinks, {ORIGIN: Faults(away=(at_s, at_s + for_s))})
    (delivered,) = _run(swarm, plan, [_body(1)])
    assert not any(delivery.culprits for delivery in delivered.values())


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 4), st.sampled_from([1.0, 2.5]), st.booleans())
def test_a_relay_that_dies_costs_little_and_is_not_fetched_from_again(
    number: int, at_s: float, silently: bool
) -> None:
    plan = _plan(6, "chain")
    dead = f"w{number}"
    gone = (at_s, NEVER)
    faults = Faults(hangs=gone) if silently else Faults(away=gone)
    swarm = make_swarm({ORIGIN: BYTES_PER_S, **dict.fromkeys(plan.assignments, BYTES_PER_S)}, {dead: faults})
    (delivered,) = _run(swarm, plan, [_body(2)])
    for name, delivery in delivered.items():
        again = sum(delivery.bytes_from.values()) - SIZE.payload_bytes
        assert again <= 0.25 * SIZE.payload_bytes, (name, delivery)
    assert swarm.peers[ORIGIN].sent_bytes <= 2.2 * SIZE.payload_bytes


def test_the_first_worker_sees_every_byte_of_the_origin_once_in_a_chain() -> None:
    plan = _plan(7, "chain")
    swarm = make_swarm({ORIGIN: BYTES_PER_S, **dict.fromkeys(plan.assignments, BYTES_PER_S)}, {})
    (delivered,) = _run(swarm, plan, [_body(3)])
    assert swarm.peers[ORIGIN].sent_bytes == SIZE.payload_bytes
    slowest_s = max(delivery.seconds for delivery in delivered.values())
    assert slowest_s <= plan.seconds * 1.1


@pytest.mark.parametrize("origin_slow", [1.0, 1.2])
def test_relays_that_drip_the_last_chunks_do_not_hold_a_worker_up(origin_slow: float) -> None:
    chunk_bytes, chunks = 10_000, 20
    body = np.random.default_rng(7).bytes(chunk_bytes * chunks)
    h1, h2 = Faults(drips=tuple(range(chunks))), Faults(drips=(0,))
    names = (ORIGIN, "h1", "h2", "w0")
    swarm = make_swarm(
        dict.fromkeys(names, 10_000.0), {"h1": h1, "h2": h2, ORIGIN: Faults(slow=origin_slow)}, stall_s=30.0
    )
    plan = Plan(20.0, {"w0": Assignment(("h1", "h2", ORIGIN), (), 3, 10_000.0)})

    async def fetch() -> DeliveryRecord:
        payload = publish(swarm, body, chunk_bytes)
        for relay in ("h1", "h2"):
            held = swarm.peers[relay].store.receive(payload)
            for index in range(chunks):
                held.write(index, body[index * chunk_bytes : (index + 1) * chunk_bytes])
        return await swarm.fetch("w0", payload, plan)

    assert virtual_loop().run(fetch()).seconds < 300.0
