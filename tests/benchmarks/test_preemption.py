"""The preemption benchmark's schedules say what they promise, and its stand-in continues exactly."""

import itertools
import math

import numpy as np
import pytest

from antiphon.benchmarks.parts.preemption import schedule
from antiphon.benchmarks.parts.preemption.fleet import PacedEngine, length_of, logprobs_of, tokens_of
from antiphon.core.errors import ConfigError
from antiphon.core.records import SamplingParameters
from antiphon.services.rollout.engine.api import EngineRequest

HOUR = 3600.0


def test_chance_reclaims_the_share_it_was_given() -> None:
    stays = schedule.by_chance(200, 10 * HOUR, 0.4, 600.0, seed=3)
    reclaimed = sum(stay.stop_s < 10 * HOUR for stay in stays)
    hours = sum(min(stay.stop_s, 10 * HOUR) - stay.start_s for stay in stays) / HOUR
    assert 1 - math.exp(-reclaimed / hours) == pytest.approx(0.4, abs=0.02)
    by_slot: dict[int, list[schedule.Stay]] = {}
    for stay in stays:
        by_slot.setdefault(stay.slot, []).append(stay)
    for members in by_slot.values():
        for before, after in itertools.pairwise(members):
            assert after.start_s == before.stop_s + 600.0
    assert schedule.by_chance(8, HOUR, 0.4, 600.0, 1) == schedule.by_chance(8, HOUR, 0.4, 600.0, 1)


def test_never_replaced_means_never() -> None:
    stays = schedule.by_chance(8, 100 * HOUR, 0.9, math.inf, seed=0)
    assert len(stays) == 8 and all(stay.stop_s < math.inf for stay in stays)


def test_at_one_moment_a_share_goes_and_comes_back() -> None:
    stays = schedule.at_one_moment(8, HOUR, 0.4, 600.0)
    assert sorted(stay.stop_s for stay in stays) == [HOUR / 2] * 3 + [math.inf] * 8
    assert [stay.start_s for stay in stays if stay.start_s > 0] == [HOUR / 2 + 600.0] * 3


def test_a_trace_is_followed_where_it_is_most_eventful() -> None:
    sizes = [(0.0, 16), (1000.0, 16), (5000.0, 8), (5100.0, 16), (5200.0, 4), (5400.0, 16), (20_000.0, 16)]
    stays = schedule.by_trace(sizes, 8, 1000.0)
    present = [sum(stay.start_s <= at < stay.stop_s for stay in stays) for at in (0.0, 150.0, 250.0, 950.0)]
    assert present == [4, 8, 2, 8]
    with pytest.raises(ConfigError, match="no stretch"):
        schedule.by_trace([(0.0, 1), (1.0, 0), (10_000.0, 0), (10_001.0, 1)], 8, 9000.0)


def test_every_recorded_trace_can_be_read() -> None:
    found = schedule.traces()
    if not found:
        pytest.skip("no recorded traces beside the project")
    for sizes in found.values():
        times = [at for at, _ in sizes]
        assert times == sorted(times) and min(count for _, count in sizes) >= 0


def test_the_stand_in_goes_on_after_a_prefix() -> None:
    seeds = [5, 6, 7]
    engine = PacedEngine(group_s=10.0, token_s=1e-6)
    engine.load_weights(0, {}, "d")
    given = {str(seed): length_of(seed, 10.0) // 2 for seed in seeds}
    parameters = SamplingParameters(max_tokens=480)
    for seed in seeds:
        prefix = tuple(tokens_of(seed, 10.0)[: given[str(seed)]].tolist())
        engine.add([EngineRequest(str(seed), (3,), seed, parameters, prefix_token_ids=prefix)])
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
    for output in outputs:
        whole = tokens_of(int(output.request_id), 10.0)
        rest = whole[given[output.request_id] :]
        assert output.token_ids.tolist() == rest.tolist()
        assert output.logprobs.tobytes() == logprobs_of(rest).tobytes()
    lengths = [length_of(seed, 120.0) for seed in range(4000)]
    slowest = np.max(np.reshape(lengths, (1000, 4)), axis=1).mean() * 0.5
    assert slowest == pytest.approx(120.0, rel=0.05)
