"""The two rules of keyed sampling: flips by rounding, the power of the law test, and what a draw costs.

On an engine whose bits depend on the batch the same token is drawn from logits that differ by rounding.
Here they differ by normal noise of 0.01 on every logit, with 16,000 tokens and an entropy of 0.5 nats.
`flips_cdf` and `flips_gumbel` are the shares of rows whose token is another one, `total_variation` is the
mean distance of the two distributions. Checked: flips under the Gumbel rule are at most 3 times the total
variation, with 99% confidence (Wilson's interval); both rules pass the start-up law test, at 16,000 and at
151,936 tokens; and samplers that never draw half of 151,936 tokens are found by it. The exit status is 1
where one of these does not hold. The last line is JSON.

    .venv/bin/python benchmarks/sampling_rules.py [--rows N] [--record]
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from antiphon.benchmarks.parts.results import finish
from antiphon.core.seeds import generator
from antiphon.sampling.keyed_sampler import PLAIN, request_key
from antiphon.sampling.rules import RULES
from antiphon.services.rollout.selfcheck.distribution_check import Z_LIMIT, law_z

VOCABULARY, ENTROPY, NOISE = 16_000, 0.5, 0.01
LARGE_VOCABULARY = 151_936
ROWS = 120_000
ROWS_A_NOISE = 480
"""Rows that share one pattern of noise; each row has a seed of its own."""
DRAWS = 768
"""Tokens of one law test, as at a worker's start."""
MOST_FLIPS = 3.0
"""Flips of the Gumbel rule as a multiple of the total variation; 2 is the bound of theory."""
CONFIDENCE_Z = 2.326
"""One-sided 99% of a standard normal number."""

Float64Array = npt.NDArray[np.float64]


def main() -> int:
    """Measure, check and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS, help="rows drawn twice under the Gumbel rule")
    parser.add_argument("--record", action="store_true", help="keep the result file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(arguments.rows)
    return finish(result, record=arguments.record, violated=violations(result), at_size=flipped(result))


def measure(rows: int) -> dict[str, Any]:
    """Return the last line's object; `rows` are drawn twice by the Gumbel rule, a sixth by the other."""
    logits = peaked_logits(VOCABULARY, ENTROPY)
    drawn = rows // ROWS_A_NOISE * ROWS_A_NOISE
    flips_cdf, _ = flips("inverse_cdf", logits, drawn // 6)
    flips_gumbel, distance = flips("gumbel", logits, drawn)
    return {
        "flips_cdf": flips_cdf,
        "flips_gumbel": flips_gumbel,
        "flips_gumbel_high": wilson_high(flips_gumbel, drawn),
        "total_variation": distance,
        "rows": drawn,
        "law_z": {
            rule: max(honest_z(rule, size) for size in (VOCABULARY, LARGE_VOCABULARY)) for rule in RULES
        },
        "law_power_found": float(np.mean([z > Z_LIMIT for z in faulty_zs(LARGE_VOCABULARY)])),
        "microseconds_per_row": {
            f"{rule}_{size}": round(microseconds(rule, size), 1)
            for rule in RULES
            for size in (VOCABULARY, LARGE_VOCABULARY)
        },
    }


def flipped(result: dict[str, Any]) -> list[str]:
    """Return a sentence when the Gumbel rule may flip more tokens than it should; few rows cannot say."""
    most = MOST_FLIPS * result["total_variation"]
    if result["flips_gumbel_high"] <= most:
        return []
    return [f"flips_gumbel may be {result['flips_gumbel_high']:.2e}, above 3 total variations, {most:.2e}"]


def violations(result: dict[str, Any]) -> list[str]:
    """Return a sentence for every law test that does not hold."""
    found = [f"{rule} fails the law test: z={z:.1f}" for rule, z in result["law_z"].items() if z >= Z_LIMIT]
    if result["law_power_found"] < 1.0:
        found.append("a sampler that never draws half of the vocabulary was not found")
    return found


def peaked_logits(vocabulary: int, entropy: float) -> torch.Tensor:
    """Return logits [V] of one likely token and a normal tail, with the given entropy in nats."""
    tail = generator("sampling-rules-tail").standard_normal(vocabulary)
    low, high = 0.0, 40.0
    for _ in range(60):
        tail[vocabulary // 3] = middle = (low + high) / 2
        logprobs = tail - math.log(np.exp(tail).sum())
        wide = -float((np.exp(logprobs) * logprobs).sum()) > entropy
        low, high = (middle, high) if wide else (low, middle)
    return torch.from_numpy(tail).to(torch.float32)


def flips(rule: str, logits: torch.Tensor, rows: int) -> tuple[float, float]:
    """Return the share of rows whose token noise on the logits changes, and the mean total variation.

    Args:
        rule: one of `RULES`.
        logits: [V] float32.
        rows: how many; a multiple of `ROWS_A_NOISE` uses all of them.
    """
    chance = generator("sampling-rules-noise", rule)
    exact = torch.softmax(logits.double(), -1)
    changed, distances, patterns = 0, [], max(1, rows // ROWS_A_NOISE)
    for pattern in range(patterns):
        noise = torch.from_numpy(chance.standard_normal(len(logits))).to(torch.float32)
        disturbed = logits + NOISE * noise
        distances.append(float((torch.softmax(disturbed.double(), -1) - exact).abs().sum()) / 2)
        seeds = range(pattern * ROWS_A_NOISE, (pattern + 1) * ROWS_A_NOISE)
        before, after = (draw(rule, row, seeds) for row in (logits, disturbed))
        changed += int((before != after).sum())
    return changed / (patterns * ROWS_A_NOISE), float(np.mean(distances))


def draw(rule: str, logits: torch.Tensor, seeds: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return a token for each seed, [N], all from the same logits [V]."""
    keys = np.array([request_key(seed) for seed in seeds], dtype=np.uint64)
    rows = logits.expand(len(keys), -1)
    tokens: npt.NDArray[np.int64] = RULES[rule].draw(rows, keys, np.full(len(keys), 11), PLAIN)[0].numpy()
    return tokens


def wilson_high(share: float, count: int) -> float:
    """Return the upper end of Wilson's interval (1927), one-sided 99%, for a share of `count` trials."""
    z2 = CONFIDENCE_Z**2
    middle = share + z2 / (2 * count)
    width = CONFIDENCE_Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return (middle + width) / (1 + z2 / count)


def honest_z(rule: str, vocabulary: int) -> float:
    """Return the law test's verdict on a rule, for a wide distribution."""
    chance = generator("sampling-rules-law", vocabulary)
    logits = torch.from_numpy(2.0 * chance.standard_normal(vocabulary)).to(torch.float32)
    tokens = draw(rule, logits, range(DRAWS))
    z, degrees = law_z(tokens, torch.softmax(logits.double(), -1).numpy(), chance.random(DRAWS))
    assert degrees > 0, "nothing was tested"
    return round(z, 2)


def faulty_zs(vocabulary: int) -> list[float]:
    """Return the law test's verdict on samplers that never draw one half of the vocabulary: four halves."""
    chance = generator("sampling-rules-faults", vocabulary)
    logits = 2.0 * chance.standard_normal(vocabulary)
    p: Float64Array = np.exp(logits) / np.exp(logits).sum()
    ids = np.arange(vocabulary)
    found = []
    for never in (ids >= vocabulary // 2, ids < vocabulary // 2, ids % 2 == 0, p > np.median(p)):
        rest = np.where(never, 0.0, p)
        tokens = chance.choice(vocabulary, size=DRAWS, p=rest / rest.sum())
        found.append(law_z(tokens, p, chance.random(DRAWS))[0])
    return found


def microseconds(rule: str, vocabulary: int, rows: int = 32, times: int = 5) -> float:
    """Return CPU microseconds of one row on one thread, the best of some batches."""
    logits = torch.from_numpy(generator("sampling-rules-cost").standard_normal((rows, vocabulary))).float()
    keys, positions = np.arange(rows, dtype=np.uint64), np.arange(rows)
    best = math.inf
    for _ in range(times):
        begun = time.thread_time()
        RULES[rule].draw(logits, keys, positions, PLAIN)
        best = min(best, (time.thread_time() - begun) / rows)
    return 1e6 * best


if __name__ == "__main__":
    sys.exit(main())
