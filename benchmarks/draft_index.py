"""Cost of the draft index alone: building it, keeping it, and drafting from it for a full batch.

A group of 64 responses of 1,000 random tokens, in which no context recurs, is indexed; then 64 requests,
eight to a group with 8 past responses each, grow token by token along texts that follow their history
with a typo every 12 tokens, and all of them draft at each step. That is a part of the drafter's cost:
learning from outcomes, Python lists and handing drafts to vLLM come on top. Times are CPU milliseconds,
medians of repetitions; the last line is one JSON object.

    .venv/bin/python benchmarks/draft_index.py
"""

import argparse
import json
import statistics
from time import process_time

import numpy as np

from antiphon.core.drafting.config import DraftingSection
from antiphon.core.drafting.forest import DraftForest

RESPONSES, TOKENS = 64, 1_000
GROUPS, GROUP_SIZE, HISTORY = 8, 8, 8
TYPO_EVERY = 12
STEPS = 200


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    source = np.random.default_rng(arguments.seed)
    index_ms, bytes_per_token = index(source, arguments.vocabulary, arguments.repetitions)
    print(f"index of {RESPONSES} x {TOKENS} tokens: {index_ms:.1f} ms, {bytes_per_token:.1f} bytes a token")
    draft_ms, drafted = draft(source, arguments.vocabulary)
    print(
        f"{GROUPS * GROUP_SIZE} requests drafting: {draft_ms:.3f} ms a step, {drafted:.1f} tokens a request"
    )
    result = {
        "index_ms": round(index_ms, 3),
        "bytes_per_token": round(bytes_per_token, 2),
        "draft_ms_64": round(draft_ms, 4),
        "drafted_per_request": round(drafted, 2),
        "vocabulary": arguments.vocabulary,
        "seed": arguments.seed,
    }
    print(json.dumps(result))


def index(source: np.random.Generator, vocabulary: int, repetitions: int) -> tuple[float, float]:
    """Return the CPU milliseconds of indexing one group, and bytes per stored token with all arrays."""
    settings = DraftingSection()
    texts = [source.integers(0, vocabulary, TOKENS).astype(np.int32) for _ in range(RESPONSES)]
    forest = DraftForest(RESPONSES, settings.max_window, settings.min_match)
    times = []
    share = 0.0
    for _ in range(repetitions):
        before = process_time()
        group = forest.open_group([1, 2, 3], [(text, 1.0) for text in texts], TOKENS, vocabulary)
        times.append(1e3 * (process_time() - before))
        share = forest.bytes_used / forest.stored_tokens
        forest.close_group(group)
    return statistics.median(times), share


def draft(source: np.random.Generator, vocabulary: int) -> tuple[float, float]:
    """Return the median CPU milliseconds of one call for the whole batch, and tokens drafted a request."""
    settings = DraftingSection()
    requests = GROUPS * GROUP_SIZE
    forest = DraftForest(requests, settings.max_window, settings.min_match)
    rows = np.zeros((requests, STEPS + 8), dtype=np.int32)
    for g in range(GROUPS):
        # Texts of a small alphabet of phrases: history that recurs, as that of one policy does.
        phrases = source.integers(0, vocabulary, (24, TYPO_EVERY)).astype(np.int32)
        texts = [phrases[source.integers(0, 24, TOKENS // TYPO_EVERY)].ravel() for _ in range(HISTORY)]
        group = forest.open_group([1, 2, 3], [(t, 1.0) for t in texts], GROUP_SIZE * STEPS, vocabulary)
        for k in range(GROUP_SIZE):
            row = g * GROUP_SIZE + k
            text = phrases[source.integers(0, 24, STEPS // TYPO_EVERY + 2)].ravel()[: STEPS + 5].copy()
            text[source.integers(0, TYPO_EVERY) :: TYPO_EVERY] = source.integers(0, vocabulary)
            rows[row, :3], rows[row, 3:] = (1, 2, 3), text
            forest.open_request(row, group, 3, STEPS + 8)
    slots = np.arange(requests, dtype=np.int64)
    limits = np.full(requests, settings.max_window, dtype=np.int64)
    times, drafted = [], 0
    for step in range(STEPS):
        lengths = np.full(requests, 3 + step, dtype=np.int64)
        before = process_time()
        _, counts, _ = forest.draft(slots, rows, lengths, limits, 0.0)
        times.append(1e3 * (process_time() - before))
        drafted += int(counts.sum())
    return statistics.median(times), drafted / (requests * STEPS)


if __name__ == "__main__":
    main()
