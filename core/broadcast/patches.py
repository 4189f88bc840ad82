"""Patches: how much two versions differ, which payloads are made, and which are fetched.

A training step changes a weight w by dw, and the snapshot rounds the sum to its own dtype. Its spacing
around w is one ulp, a unit in the last place. Where w lies between two roundings is as good as random, so
an update below one ulp changes the rounded weight with probability |dw| / ulp(w), and a larger one always:

    share = E[min(1, |dw| / ulp(w))]

Source: derived here; `benchmarks/patch.py` compares it with AdamW runs. That most bfloat16 weights stay the
same at the learning rates of reinforcement learning: PULSE, arXiv 2602.03839. Masters that were loaded
from weights of the snapshot's own dtype begin in the middle of their rounding interval; for the
first steps the share lies below the prediction.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from antiphon.core.errors import ContractError
from antiphon.core.records import Payload

MOST_SHARE = 0.5
"""A patch is made when its bytes are expected below this share of the full payload's: two larger ones in a
row would be no better than the payload itself."""


@dataclass(frozen=True, slots=True)
class Change:
    """How two versions of the same weights differ, in the dtype of the snapshot."""

    share: float
    """Changed elements of all, 0..1."""
    magnitude_bits: float
    """Mean of log2 of the difference of a changed element's bits, as of integers; 0: all by one ulp."""


def estimated_bytes(change: Change, full_bytes: int, element_bytes: int) -> int:
    """Return about how many bytes a patch takes.

    Places cost their entropy H(share) per element. A difference costs its sign and magnitude; the
    constants are fitted to bfloat16 and float32 snapshots of the demo's model at learning rates 1e-6 to
    1e-4, over 1 to 8 steps.

    >>> estimated_bytes(Change(0.01, 0.2), 1_000_000, 2) / 1_000_000
    0.006747
    """
    share = min(1.0, max(0.0, change.share))
    places = sum(-p * math.log2(p) for p in (share, 1.0 - share) if p > 0.0)
    bits = places + share * (2.5 + 1.5 * share + change.magnitude_bits)
    return math.ceil(full_bytes * min(1.0, bits / (8 * element_bytes)))


def is_worth_making(patch_bytes: int, full_bytes: int, most_share: float = MOST_SHARE) -> bool:
    """Say whether a patch of this many (estimated) bytes is made beside a full payload."""
    return patch_bytes < most_share * full_bytes


def ladder_parents(stored: Sequence[int], version: int, ladder: Sequence[int]) -> list[int]:
    """Return the versions that patches to `version` begin at, newest first.

    Args:
        stored: versions whose full payloads are at hand.
        version: the new one.
        ladder: rungs, in published versions back: 1 is the one before.

    >>> ladder_parents([0, 2, 4, 6, 8], 8, [1, 2, 4, 8])
    [6, 4, 0]
    """
    earlier = sorted({other for other in stored if other < version}, reverse=True)
    return [earlier[rung - 1] for rung in sorted(set(ladder)) if 0 < rung <= len(earlier)]


def choose_payloads(
    held: Collection[int], version: int, payloads: Mapping[int, Sequence[Payload]]
) -> list[tuple[int, Payload]]:
    """Return the payloads that bring a worker to a version with the fewest bytes, in the order of use.

    Of chains with equally many bytes the one with fewer payloads is taken.

    Args:
        held: the versions whose full weights the worker has; none for a new worker.
        version: where it should be.
        payloads: of each version that is announced; a patch whose parent is not earlier counts for nothing.

    Raises:
        ContractError: when no chain of payloads leads there.
    """
    costs = dict.fromkeys(held, (0, 0))
    steps: dict[int, tuple[int, Payload]] = {}
    for reached in sorted(payloads):
        if reached > version or reached in held:
            continue
        for payload in payloads[reached]:
            parent = payload.parent
            if parent is None:
                before = (0, 0)
            elif parent < reached and parent in costs:
                before = costs[parent]
            else:
                continue
            cost = (before[0] + payload.payload_bytes, before[1] + 1)
            if reached not in costs or cost < costs[reached]:
                costs[reached], steps[reached] = cost, (reached, payload)
    if version not in costs:
        raise ContractError(
            f"no announced payloads lead from versions {sorted(held)} to version {version}; announce a full "
            "payload"
        )
    chain: list[tuple[int, Payload]] = []
    at: int | None = version
    while at is not None and at in steps:
        chain.append(steps[at])
        at = steps[at][1].parent
    return chain[::-1]
