"""Branched rows: trajectories whose contexts begin afresh, and a second account of what saw what."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from antiphon.core.records import BatchRow, FinishReason, VersionSpan


@dataclass
class Turn:
    """What was said to a policy, whether that is all it sees, and what it sampled under which version."""

    fresh: bool
    said: list[int]
    sampled: list[int]
    version: int


Sampled = tuple[tuple[int, ...], int, float, int]
"""Context, token, log-probability and version."""


def tokens(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 3), min_size=least, max_size=most)


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[int], list[Turn]]:
    """Return a prompt, empty where a host says the first tokens, and the turns of a trajectory."""
    turn = st.builds(Turn, st.booleans(), tokens(1, 3), tokens(1, 3), st.integers(0, 1))
    turns = draw(st.lists(turn, min_size=1, max_size=5))
    version = 0
    for one in turns:
        one.version = version = version + one.version
    prompt = draw(tokens(0, 2))
    turns[0].fresh = False
    if prompt:
        turns[0].said = []
    return prompt, turns


def row_of(story: tuple[list[int], list[Turn]], group: int = 0, sample: int = 0) -> BatchRow:
    """Return a story as the row that a worker hands in."""
    prompt, turns = story
    row: list[int] = []
    spans, observed, breaks = [], [], []
    for turn in turns:
        if turn.fresh:
            breaks.append(len(row))
        if turn.said:
            observed.append((len(row), len(row) + len(turn.said)))
        row += turn.said
        spans.append(VersionSpan(turn.version, len(row), len(row) + len(turn.sampled)))
        row += turn.sampled
    logprobs = -np.arange(1, len(row) + 1, dtype=np.float32) / 8
    for start, stop in observed:
        logprobs[start:stop] = 0
    return BatchRow(
        np.array(row, dtype=np.int32),
        logprobs,
        tuple(spans),
        FinishReason.ENVIRONMENT,
        observed=tuple(observed),
        breaks=tuple(breaks),
        group_id=f"g{group}",
        prompt_key="p",
        sample_index=sample,
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        reward=0.0,
        advantage=float(group) - sample,
    )


def sampled_of(story: tuple[list[int], list[Turn]]) -> list[Sampled]:
    """Return each sampled token with the context it was sampled in."""
    context, turns = story
    found, place = [], 0
    for turn in turns:
        context = [*([] if turn.fresh else context), *turn.said]
        place += len(turn.said)
        for token in turn.sampled:
            place += 1
            found.append((tuple(context), token, -place / 8, turn.version))
            context = [*context, token]
    return found
