"""Run-ahead: how many groups elastic mode keeps in flight, so that staleness is a bound and not a target.

The gate allows what the bound S allows; opening all of it makes every group as stale as it may be, and
sampling all of it at once slows the longest completions, for which a batch waits. What the learner needs is
less: enough groups ahead to cover rollout, reward and broadcast. How much follows from what the run
measured of itself: the lengths of its completions, the pace of its workers by how much they sample at once,
the seconds of a learner step, of rewarding and of a broadcast. `choose` walks the loop with these
numbers for several candidates (some thousand groups each) and takes the least run-ahead whose seconds per
step are within `TOLERANCE` of the fastest.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean

from antiphon.core.capacity.loop_measures import LoopPace, SampledGroup, token_s
from antiphon.core.config_sections import LoopSection
from antiphon.core.seeds import generator

TOLERANCE = 0.01
"""Share of the fastest plan's seconds per step that less run-ahead may cost."""
MARGIN, MARGIN_WITH_LOSSES = 1.05, 1.2
"""Completions are taken to be slower by this factor than they were: batches of unusual lengths come, and
where leases were lost lately, groups that are begun again."""
MEASURED_STEPS = 96
"""Steps of a walk that count at least: which of the longest completions meet is chance, and of windows walked
for fewer the least is at times the luckiest one, and too small."""
WALKED_GROUPS = 64
"""Groups of a step that are walked one by one; in larger steps several are walked as one."""
GAIN = 0.05
WORTH_IT = 0.25
"""Places are left unused only where that gains this share of the seconds per step, or makes the data
fresher by this many versions at no cost."""
BATCHES_FOR_SHARE = 4
"""Before this many batches were trained all places are used: how pace depends on load is not known well."""
BATCHES_FOR_WINDOW = 4, 8
"""Before this many batches were trained `FURTHER_AT_FIRST` steps more than planned are opened, then one more:
the longest completions, for which batches wait, are among the last that a run gets to see."""
FURTHER_AT_FIRST = 3
ALIKE = 1.25
"""Unless the longest group so far is no longer than this many times the mean: then none is expected."""
SHARES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125)
"""Shares of the fleet's places that are tried."""


@dataclass(frozen=True, slots=True)
class RunAhead:
    """What elastic mode keeps in flight."""

    window: int
    """Groups that may be opened from the first one of the newest held version's step on: at least P times
    the publish interval, at most (S + 1) P."""
    share: float
    """Share of each worker's places that is used, 0..1."""
    step_s: float = math.nan
    """Seconds per step that this is expected to give; NaN while nothing is known."""
    staleness: float = math.nan
    """Mean staleness that it is expected to give, in policy versions."""

    def room(self, issued: int, newest_held: int, prompts_per_step: int) -> int:
        """Return how many more groups the window takes.

        Args:
            issued: reservations taken so far, as for `StalenessBound.room`.
            newest_held: newest version that a worker holds.
            prompts_per_step: P.
        """
        return max(0, newest_held * prompts_per_step + self.window - issued)

    def unused(self, concurrent_groups: int, leased: int) -> float:
        """Return how many more groups a worker may sample that has room for `concurrent_groups`; infinity
        where all of its room is used, which it counts in completions itself.

        >>> RunAhead(64, 0.5).unused(5, 1), RunAhead(64, 0.1).unused(1, 0), RunAhead(64, 1.0).unused(8, 9)
        (2, 1, inf)
        """
        if self.share >= 1.0:
            return math.inf
        return max(1, math.ceil(self.share * concurrent_groups - 1e-9)) - leased


def first_plan(loop: LoopSection, places: int) -> RunAhead:
    """Return the plan of a run that knows nothing of itself yet: as far ahead as the bound allows, but no
    more than two steps of groups at once, so that the first batches do not wait for all of them."""
    window = (loop.max_staleness + 1) * loop.prompts_per_step
    return RunAhead(window, min(1.0, 2 * loop.prompts_per_step / max(1, places)))


def is_due(batches: int, planned: int) -> bool:
    """Return whether `batches` measured batches are reason to plan again, after a plan made with `planned`.

    >>> [n for n in range(1, 40) if is_due(n, n - 1)]
    [1, 2, 4, 8, 16, 24, 32]
    """
    return batches > planned and (batches in (1, 2, 4) or batches // 8 > planned // 8)


def describe(plan: RunAhead, prompts_per_step: int, max_staleness: int) -> str:
    """Say what is kept in flight, for people.

    >>> describe(RunAhead(80, 0.5, 2.25, 1.4), 32, 4)
    '1.50 of at most 4 steps ahead, 50% of the places in use; expected: 2.25 s a step, staleness 1.4'
    """
    ahead = plan.window / prompts_per_step - 1.0
    found = f"{ahead:.2f} of at most {max_staleness} steps ahead, {plan.share:.0%} of the places in use"
    if math.isnan(plan.step_s):
        return f"{found}; not measured yet"
    return f"{found}; expected: {plan.step_s:.2f} s a step, staleness {plan.staleness:.1f}"


def choose(pace: LoopPace, loop: LoopSection, places: int, batches: int = BATCHES_FOR_WINDOW[1]) -> RunAhead:
    """Return the plan of least staleness that keeps the loop within tolerance of its fastest.

    Args:
        pace: how fast the parts of the loop are.
        loop: the bound, the groups of a step, the publish interval and the filter.
        places: groups that the workers can sample at once.
        batches: over which the pace was measured.
    """
    size, interval = loop.prompts_per_step, loop.publish_interval
    least, widest = interval * size, (loop.max_staleness + 1) * size
    if least >= widest or places < 1:
        return RunAhead(widest, 1.0)

    margin = MARGIN_WITH_LOSSES if pace.losses else MARGIN
    pace = replace(pace, alpha=margin * pace.alpha, beta=margin * pace.beta)

    def walked(share: float, window: int) -> RunAhead:
        at_once = math.inf if share >= 1.0 else max(1, math.ceil(share * places - 1e-9))
        return RunAhead(window, share, *walk(pace, loop, window, places, at_once))

    tried: list[RunAhead] = []
    for share in SHARES if batches >= BATCHES_FOR_SHARE else SHARES[:1]:
        if share < 1.0 and share * places < size / 4:
            break
        tried.append(walked(share, widest))
        if tried[-1].step_s > 1.2 * min(plan.step_s for plan in tried):
            break
    fastest = min(tried, key=lambda plan: plan.step_s)
    best = fastest if fastest.step_s < (1.0 - GAIN) * tried[0].step_s else tried[0]
    limit_s = (1.0 + TOLERANCE) * best.step_s
    chosen: RunAhead | None = None
    for plan in (plan for plan in tried if plan.step_s <= limit_s):
        # Less run-ahead is never faster: the least that is fast enough is found by halving.
        low, high = 0, (widest - least) // size  # whole steps: a part of one gains next to nothing
        while low < high:
            middle = (low + high) // 2
            narrower = walked(plan.share, least + middle * size)
            if narrower.step_s <= limit_s:
                high, plan = middle, narrower
            else:
                low = middle + 1
        if chosen is None or plan.staleness < chosen.staleness - WORTH_IT:
            chosen = plan
    chosen, (few, enough) = chosen or best, BATCHES_FOR_WINDOW
    longest = [group.longest for group in pace.groups]
    if batches >= enough or max(longest) <= ALIKE * fmean(longest):
        return chosen
    further = FURTHER_AT_FIRST if batches < few else 1
    return replace(chosen, window=min(widest, chosen.window + further * size))


def walk(
    pace: LoopPace, loop: LoopSection, window: int, places: int, at_once: float = math.inf
) -> tuple[float, float]:
    """Walk the loop and return (seconds per step, mean staleness), measured once it is under way.

    One pool has room for the completions of `places` groups and samples at most `at_once` groups; groups
    are replaced as the filter says. Every measured group is sampled at least twice, in other orders, and
    more follow behind the last step that counts: while the loop runs empty, it is faster than it is.
    """
    interval = loop.publish_interval
    merged = -(-loop.prompts_per_step // WALKED_GROUPS)
    size, groups = -(-loop.prompts_per_step // merged), _merge(pace.groups, merged)
    scale = size / loop.prompts_per_step
    window, places = max(interval * size, round(window * scale)), max(1, round(places * scale))
    at_once = max(1.0, at_once * scale)
    most_replaced = int((loop.refill_limit - 1.0) * size) if loop.filter == "refill" else 0
    begin = loop.max_staleness + 4
    steps = begin + max(MEASURED_STEPS, 2 * len(groups) // size)
    random, orders = generator("run-ahead"), steps * size // len(groups)
    groups = (*groups, *(groups[index] for _ in range(orders) for index in random.permutation(len(groups))))
    now = tokens = load = 0.0  # `tokens`: what a completion has got that ran from the beginning on
    # (value of `tokens` at its end, number) of each group's longest completion; of its others -1 - number
    running: list[tuple[float, int]] = []
    sampling = 0
    room = places * (groups[0].count + 1)
    rewarding: list[tuple[float, int]] = []
    held = commits = sealed = replaced = 0
    held_at: list[tuple[float, int]] = []
    learner_ends = math.inf
    line: dict[int, bool] = {}  # number of each group that waits for training -> it is rewarded
    versions: list[int] = []
    begun_s, stale, counted = 0.0, 0, 0
    window = min(window, (loop.max_staleness + 1) * size)
    while commits < steps:
        while sealed * size + len(line) < held * size + window:
            opened = len(versions)
            group = groups[opened % len(groups)]
            if load + group.count + 1 > room or sampling >= at_once:
                break
            heapq.heappush(running, (tokens + group.longest, opened))
            heapq.heappush(running, (tokens + group.others, -1 - opened))
            load += group.count + 1
            sampling += 1
            versions.append(held)
            line[opened] = False
        rate = 1.0 / token_s(pace.alpha, pace.beta, load) if running else 0.0
        sampled_s = now + max(0.0, running[0][0] - tokens) / rate if running else math.inf
        rewarded_s = rewarding[0][0] if rewarding else math.inf
        loaded_s = held_at[0][0] if held_at else math.inf
        then = min(sampled_s, rewarded_s, loaded_s, learner_ends)
        tokens += (then - now) * rate
        now = then
        if then == sampled_s:
            tokens, number = heapq.heappop(running)
            if number < 0:
                load -= groups[(-1 - number) % len(groups)].count
            else:
                load -= 1
                sampling -= 1
                heapq.heappush(rewarding, (now + groups[number % len(groups)].reward_s, number))
        elif then == rewarded_s:
            number = heapq.heappop(rewarding)[1]
            if groups[number % len(groups)].replaced and replaced < most_replaced:
                del line[number]
                replaced += 1
            else:
                line[number] = True
            while sealed < steps and len(line) >= size and next(iter(line.values())):
                front = list(islice(line, size))
                if not all(line[number] for number in front):
                    break
                if sealed >= begin:
                    stale += sum(sealed - versions[number] for number in front)
                    counted += size
                for number in front:
                    del line[number]
                sealed += 1
                replaced = 0
        elif then == loaded_s:
            held = heapq.heappop(held_at)[1]
        else:
            commits += 1
            learner_ends = math.inf
            if commits % interval == 0:
                heapq.heappush(held_at, (now + pace.broadcast_s, commits))
            if commits == begin:
                begun_s = now
        if math.isinf(learner_ends) and commits < sealed:
            learner_ends = now + pace.learner_s
    return float(now - begun_s) / (steps - begin), stale / max(1, counted)


def _merge(groups: Sequence[SampledGroup], count: int) -> Sequence[SampledGroup]:
    """Make one group of every `count` neighbours: as long as the longest, with the tokens of all."""
    if count == 1:
        return groups
    merged = []
    # Neighbours that are alike, so that as many are replaced.
    alike = sorted(range(len(groups)), key=lambda index: (groups[index].replaced, index))
    for index in range(0, len(groups), count):
        block = [groups[place] for place in alike[index : index + count]]
        longest = max(group.longest for group in block)
        others = sum(group.count + 1 for group in block) - 1
        tokens = sum(group.longest + group.others * group.count for group in block) - longest
        reward_s = max(group.reward_s for group in block)
        one = SampledGroup(longest, tokens / max(1, others), others, reward_s, replaced=block[0].replaced)
        merged.append((alike[index], one))
    return [one for _, one in sorted(merged, key=lambda pair: pair[0])]
