"""What MLflow is fed with besides metrics of steps: trajectories, and samples of the machine."""

import os
import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.metrics import SYSTEM_METRICS
from antiphon.core.records import BatchRow, FinishReason, RowTiming, VersionSpan
from antiphon.lineage.rollout_table import count_workers, decode_timings, encode_timings
from antiphon.lineage.tracking.system_metrics import SAMPLES_KEPT, SystemSampler
from antiphon.lineage.tracking.traces import pick_rows


def row(group: str, sample: int, reward: float, versions: tuple[int, ...] = (3,)) -> BatchRow:
    spans = tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(versions))
    tokens = np.zeros(len(versions), np.int32)
    return BatchRow(
        tokens,
        tokens.astype(np.float32),
        spans,
        FinishReason.STOP,
        group_id=group,
        prompt_key="p",
        sample_index=sample,
        prompt_token_ids=np.zeros(2, np.int32),
        reward=reward,
        advantage=0.0,
    )


@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from([2, 3])), max_size=12), st.integers(0, 5))
def test_trajectories_are_picked_from_worst_to_best_of_one_version(
    made: list[tuple[float, int]], count: int
) -> None:
    rows = [row("g", i, reward, (version,)) for i, (reward, version) in enumerate(made)]
    own = [i for i, (_, version) in enumerate(made) if version == 3]
    found = pick_rows(rows, 3, count)
    assert set(found) <= set(own) and len(found) == len(set(found)) == min(count, len(own))
    rewards = [rows[i].reward for i in found]
    assert rewards == sorted(rewards)
    if count > 1 and len(own) > 1:
        assert rewards[0] == min(rows[i].reward for i in own)
    if found:
        assert rewards[-1] == max(rows[i].reward for i in own)


def test_a_trajectory_of_two_versions_belongs_to_neither() -> None:
    assert pick_rows([row("g", 0, 1.0, (2, 3)), row("g", 1, 0.0)], 3, 2) == [1]


def test_workers_are_counted_from_the_timings_alone() -> None:
    notes = [RowTiming("g", i, f"w{i % 3 // 2}", "l", 1, 1.0, 0.0, 1.0, 2.0) for i in range(6)]
    payload = encode_timings(notes)
    assert count_workers(payload) == {"w0": 4, "w1": 2}
    assert decode_timings(payload) == notes


def test_a_look_at_the_machine_names_what_the_catalogue_names() -> None:
    sampler = SystemSampler(3600.0, run_s=60.0)
    try:
        sampler.sample()
        before = sampler.sample()
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            after = sampler.sample()
        finally:
            child.communicate(b"\n", timeout=60)
    finally:
        sampler.close()
    assert set(after.metrics) == {f"system/{metric.name}" for metric in SYSTEM_METRICS}
    assert after.metrics["system/run_processes"] == before.metrics["system/run_processes"] + 1
    assert after.metrics["system/run_memory_megabytes"] > 1 and after.second >= 60
    assert 0 < after.metrics["system/system_memory_usage_percentage"] <= 100 and os.cpu_count()


def test_samples_wait_for_a_collector_and_the_oldest_go_first() -> None:
    sampler = SystemSampler(1e-4)
    try:
        for _ in range(60_000):
            if len(sampler._samples) >= 3 or sampler._over.wait(0.001):
                break
    finally:
        sampler.close()
    waiting = len(sampler._samples)
    first = sampler.collect(2)
    assert len(first) == 2 and first[0].at <= first[1].at
    assert len(sampler.collect(SAMPLES_KEPT)) == waiting - 2 and sampler.collect(5) == []
