"""What changes between versions is predicted, and the cheapest way to a version is found."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.benchmarks.patch import predicted_change
from antiphon.core.broadcast.patches import (
    Change,
    choose_payloads,
    estimated_bytes,
    is_worth_making,
    ladder_parents,
)
from antiphon.core.errors import ContractError


@dataclass(frozen=True, slots=True)
class Offered:
    """A payload, as far as choosing goes."""

    parent: int | None
    payload_bytes: int


@st.composite
def offers(draw: st.DrawFn) -> dict[int, list[Offered]]:
    versions = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=6)))
    parent = st.none() | st.integers(0, 13)
    offered = st.builds(Offered, parent, st.integers(0, 20))
    return {version: draw(st.lists(offered, max_size=3)) for version in versions}


def cheapest(held: set[int], version: int, payloads: dict[int, list[Offered]]) -> tuple[int, int] | None:
    """Try every version held, every sequence of others, and every payload that leads from one to the next."""
    if version in held:
        return 0, 0
    costs = []
    others = payloads.keys() - held
    for length in range(1, len(others) + 1):
        for path in itertools.combinations(sorted(others), length):
            if path[-1] != version:
                continue
            for first in {None, *held}:
                bytes_, before, possible = 0, first, True
                for reached in path:
                    fitting = [
                        offer.payload_bytes
                        for offer in payloads[reached]
                        if offer.parent == before and (before is None or before < reached)
                    ]
                    possible = possible and bool(fitting)
                    bytes_ += min(fitting, default=0)
                    before = reached
                if possible:
                    costs.append((bytes_, length))
    return min(costs, default=None)


@given(payloads=offers(), held=st.sets(st.integers(0, 12), max_size=3), data=st.data())
def test_the_chain_is_the_cheapest_of_all(payloads, held, data) -> None:
    version = data.draw(st.sampled_from(sorted(payloads)))
    best = cheapest(held, version, payloads)
    if best is None:
        with pytest.raises(ContractError, match=f"to version {version}"):
            choose_payloads(held, version, payloads)
        return
    chain = choose_payloads(held, version, payloads)
    assert (sum(payload.payload_bytes for _, payload in chain), len(chain)) == best
    have = set(held)
    for reached, payload in chain:
        assert payload in payloads[reached] and (payload.parent is None or payload.parent in have)
        have.add(reached)
    assert version in have


def test_late_and_new_workers_fetch_the_fewest_bytes() -> None:
    sizes = {1: 10, 2: 17, 4: 29, 8: 50}
    payloads = {
        version: [
            Offered(None, 1000),
            *(Offered(version - rung, size) for rung, size in sizes.items() if rung <= version),
        ]
        for version in range(21)
    }
    assert [version for version, _ in choose_payloads([19], 20, payloads)] == [20]
    assert sum(payload.payload_bytes for _, payload in choose_payloads([7], 20, payloads)) == 50 + 29 + 10
    assert [payload.parent for _, payload in choose_payloads([], 20, payloads)] == [None]
    assert choose_payloads([7, 20], 20, payloads) == []


def test_rungs_are_counted_in_versions_at_hand() -> None:
    assert ladder_parents([], 3, [1, 2]) == []
    assert ladder_parents([5, 1, 3, 9], 7, [2, 1, 1, 4, 0]) == [5, 3]


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-4, 1e-2])
def test_the_predictor_counts_what_rounding_changes(rate) -> None:
    rng = np.random.default_rng(0)
    masters = rng.normal(0.0, 0.03, 400_000).astype(np.float32)
    updates = (rate * rng.normal(0.0, 0.7, len(masters))).astype(np.float32)

    def rounded(values: np.ndarray) -> np.ndarray:
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.int64)

    differences = np.abs(rounded(masters + updates) - rounded(masters))
    predicted = predicted_change(masters, updates, "bfloat16")
    assert predicted.share == pytest.approx(float((differences > 0).mean()), rel=0.03)
    assert predicted.magnitude_bits == pytest.approx(
        float(np.log2(differences[differences > 0]).mean()), rel=0.1, abs=0.1
    )


def test_the_predictor_at_the_edges() -> None:
    tiny = np.float32(1e-45)
    assert predicted_change(np.zeros(3, np.float32), np.zeros(3, np.float32), "float32").share == 0.0
    assert predicted_change(np.zeros(3, np.float32), np.full(3, tiny), "float32").share == 1.0
    assert predicted_change(np.zeros(0), np.zeros(0), "bfloat16") == Change(0.0, 0.0)
    assert predicted_change(np.ones(2), np.full(2, -(2.0**-3)), "bfloat16") == Change(1.0, 4.0)


def test_an_estimate_never_exceeds_the_full_payload_and_grows_with_the_share() -> None:
    shares = np.linspace(0.0, 1.0, 21)
    sizes = [estimated_bytes(Change(float(share), 0.3), 10_000, 2) for share in shares]
    assert sizes[0] == 0 and sizes == sorted(sizes)
    assert estimated_bytes(Change(1.0, 60.0), 10_000, 2) == 10_000
    assert [is_worth_making(size, 10_000) for size in (4_999, 5_000)] == [True, False]
