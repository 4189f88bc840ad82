"""Reasons: whether what was decided about a group follows from what is known of it.

None of this shares code with what decides; the witness (`simulator/checks/invariants.py`) asks.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence

from antiphon.core.algorithm import AlgorithmSection
from antiphon.core.config import RunConfig
from antiphon.core.records import Lease
from antiphon.simulator.standins.arithmetic import END_TOKEN

TOLERANCE = 1e-9
"""By how much an advantage may differ, since sums may be taken in another order."""


def differ(rewards: Sequence[float], failed: Collection[int]) -> bool:
    """Return whether the rewards of those samples that did not fail differ."""
    return len({reward for index, reward in enumerate(rewards) if index not in failed}) > 1


def wrongly_chosen(config: RunConfig, used: bool, rewards: Sequence[float], failed: Collection[int]) -> str:
    """Return what is wrong with training on a group, or with filtering it; "" if nothing is."""
    varied = differ(rewards, failed)
    if used and not varied and config.loop.filter != "none":
        return f"trains, but its rewards {rewards} do not differ"
    if not used and (varied or config.loop.filter == "none"):
        return f"was filtered, with rewards {rewards} under filter={config.loop.filter}"
    return ""


def not_stale(oldest: int, step: int, bound: int) -> str:
    """Return why a group should not have been called stale that would train at `step`; "" if it is."""
    if step - oldest > bound:
        return ""
    return f"was called stale, but version {oldest} may train at step {step}"


def too_many_open(living: int, sealed: int, newest: int, config: RunConfig) -> str:
    """Return why no further group may be open in elastic mode, or "".

    Args:
        living: training groups that live, the new one included.
        sealed: steps that have a batch.
        newest: newest version that a worker can hold.
        config: the run's.
    """
    places = config.loop.prompts_per_step
    step = sealed + (living - 1) // places
    if step <= newest + config.loop.max_staleness:
        return ""
    return f"{living} groups live after {sealed} batches, so the last one trains beyond the bound"


def false_beginning(lease: Lease) -> str:
    """Return why what a lease continues from can be the beginning of no completion, or ""."""
    for piece in lease.prefix:
        ends = piece.token_ids == END_TOKEN
        last_sampled = bool(ends.size) and not (piece.observed and piece.observed[-1][1] == ends.size)
        unfinished = last_sampled and ends[-1] and piece.finish_reason is None
        for start, stop in piece.observed:  # a turn ends before them, and they may be any tokens
            ends[max(0, start - 1) : stop] = False
        if ends[:-1].any() or unfinished:
            return f"is to be continued from tokens {piece.token_ids.tolist()} that go on after their end"
    return ""


def seeds_taken(
    owners: dict[int, tuple[object, ...]], seeds: Sequence[int], owner: tuple[object, ...]
) -> str:
    """Enter who samples with which seed; return which seed another has, or ""."""
    for index, seed in enumerate(seeds):
        before = owners.setdefault(seed, (*owner, index))
        if before != (*owner, index):
            return f"seed {seed} is that of {before} and of {(*owner, index)}"
    return ""


def wrong_advantages(
    rewards: Mapping[int, float], given: Mapping[int, float], algorithm: AlgorithmSection
) -> str:
    """Return what is wrong with the advantages of a group, or "".

    Args:
        rewards: sample -> reward, of those that count.
        given: sample -> advantage, of all.
        algorithm: says how they are made.
    """
    if algorithm.advantage is not None or "batch" in (algorithm.baseline, algorithm.deviation):
        return ""  # the user's function says, or the other groups do
    mean = statistics.fmean(rewards.values()) if rewards else 0.0
    spread = statistics.stdev(rewards.values()) if len(rewards) > 1 else 0.0
    for sample, advantage in given.items():
        expected = 0.0
        if sample in rewards and spread > 0.0:
            others = [reward for other, reward in rewards.items() if other != sample]
            base = statistics.fmean(others) if algorithm.baseline == "leave_one_out" else mean
            expected = rewards[sample] - base
            expected /= spread + 1e-6 if algorithm.divides_by_deviation else 1.0
        if abs(advantage - expected) > TOLERANCE * max(1.0, abs(expected)):
            return f"sample {sample} has the advantage {advantage}, but its reward gives {expected}"
    return ""
