"""Sealing: what a step divides by, and completions that count as never sampled."""

from pathlib import Path

import numpy as np
import pytest

from antiphon.core.config import RunConfig, build_config, load_config
from antiphon.core.loop.assembly import SealPlan
from antiphon.core.loop.events import BatchSealed, StepCommitted
from antiphon.core.loop.group_state import GroupPhase, GroupState, Tally, sealed_batch
from antiphon.core.records import (
    BatchRow,
    FinishReason,
    GroupSubmission,
    Prompt,
    Trajectory,
    VersionSpan,
)
from antiphon.lineage.rollout_table import LeftOut, decode_batch, decode_timings, read_batch
from antiphon.lineage.run_log import step_line
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.lineage.tracking.charts import step_metrics
from antiphon.services.coordinator.sealing import Sampled, seal_batch

EXAMPLES = Path(__file__).parents[3] / "examples" / "own-objective"
LENGTHS = (2, 5, 3, 5)
CUT_OFF = (False, True, False, True)


def sampled(name: str, rewards: tuple[float, ...]) -> tuple[GroupState, Sampled]:
    trajectories = tuple(
        Trajectory(
            np.ones(length, dtype=np.int32),
            np.full(length, -1.0, dtype=np.float32),
            (VersionSpan(0, 0, length),),
            FinishReason.LENGTH if cut else FinishReason.STOP,
            sample_index=index,
            seed=index,
        )
        for index, (length, cut) in enumerate(zip(LENGTHS, CUT_OFF, strict=True))
    )
    group = GroupState(name, 0, "train", 0, 0, 4, phase=GroupPhase.REWARDED)
    group.token_counts, group.rewards = LENGTHS, rewards
    return group, (GroupSubmission("l", name, "w", trajectories, 0.0), Prompt("key", (1, 2)))


def sealed(folder: Path, filter_: str, truncated: str) -> tuple[list[BatchRow], list[LeftOut]]:
    config: RunConfig = build_config(
        {
            "loop": {"filter": filter_},
            "algorithm": {"truncated_completions": truncated, "normalise_advantages": False},
        }
    )
    (used, by_used), (filtered, by_filtered) = sampled("g0", (1.0, 1.0, 0.0, 1.0)), sampled("g1", (1.0,) * 4)
    plan, given = SealPlan(0, (used,), (filtered,)), {"g0": by_used}
    if truncated == "mask":
        given["g1"] = by_filtered
    store = ArtifactStore(folder)
    payload = store.get(seal_batch(plan, given, Tally(), config, store).digest)
    return read_batch(payload)


def test_what_the_reference_said_is_a_column_and_may_be_taken_from_the_rewards(tmp_path: Path) -> None:
    group, given = sampled("g0", (1.0, 1.0, 0.0, 1.0))
    said = [np.full(length, -1.0 - 0.1 * length, dtype=np.float32) for length in LENGTHS]
    found = []
    for place in ("loss", "reward"):
        config = build_config(
            {
                "algorithm": {"normalise_advantages": False},
                "reference": {"kl": 0.5, "kl_estimator": "k1", "kl_place": place},
            }
        )
        store, plan = ArtifactStore(tmp_path), SealPlan(0, (group,), ())
        sealed = seal_batch(plan, {"g0": given}, Tally(), config, store, references={"g0": said})
        found.append(decode_batch(store.get(sealed.digest)))
    for rows in found:
        assert [row.reward for row in rows] == [1.0, 1.0, 0.0, 1.0], "the record keeps the environment's"
        for row, one in zip(rows, said, strict=True):
            assert row.reference_logprobs is not None and row.reference_logprobs.tolist() == one.tolist()
    # Of each token k1 = -1 - (-1 - T / 10) = T / 10 nats, so of a row T * T / 10; half of that is taken.
    less = np.array([1.0, 1.0, 0.0, 1.0]) - 0.05 * np.square(LENGTHS)
    assert [row.advantage for row in found[0]] == [0.25, 0.25, -0.75, 0.25]
    np.testing.assert_allclose([row.advantage for row in found[1]], less - less.mean(), atol=1e-6)


@pytest.mark.parametrize(
    ("truncated", "advantages", "left_out"),
    [
        ("train", [0.25, 0.25, -0.75, 0.25], LeftOut("g1", 4, 15)),
        ("mask_loss", [0.25, 0.25, -0.75, 0.25], LeftOut("g1", 4, 15)),
        ("mask", [0.5, 0.0, -0.5, 0.0], LeftOut("g1", 2, 5)),
    ],
)
def test_a_masked_completion_moves_no_baseline_and_is_in_no_divisor(
    tmp_path: Path, truncated: str, advantages: list[float], left_out: LeftOut
) -> None:
    rows, found = sealed(tmp_path, "drop", truncated)
    assert [row.advantage for row in rows] == advantages
    assert found == [left_out]


def test_a_long_completion_loses_reward_before_advantages_are_made_and_its_recorded_reward_stays(
    tmp_path: Path,
) -> None:
    algorithm = {"normalise_advantages": False, "overlong_margin_tokens": 2, "overlong_penalty": 0.5}
    config = build_config({"sampling": {"max_tokens": 4}, "algorithm": algorithm})
    group, given = sampled("g0", (1.0, 1.0, 0.0, 1.0))
    store, lengths = ArtifactStore(tmp_path), group.token_counts
    lost = [0.25 * min(2, max(0, length - 2)) for length in lengths]
    assert len(set(lost)) > 1
    rows, _ = read_batch(
        store.get(seal_batch(SealPlan(0, (group,), ()), {"g0": given}, Tally(), config, store).digest)
    )
    shaped = np.array([1.0, 1.0, 0.0, 1.0]) - lost
    assert [row.reward for row in rows] == [1.0, 1.0, 0.0, 1.0]
    assert [row.advantage for row in rows] == pytest.approx(shaped - shaped.mean())


def test_an_advantage_of_ones_own_sees_all_groups_of_a_batch_and_what_counts_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    algorithm = load_config(EXAMPLES / "reinforce_pp.yaml").algorithm
    config = build_config({"algorithm": {**algorithm.model_dump(), "truncated_completions": "mask"}})
    assert config.idle_keys() == ()
    (one, by_one), (two, by_two) = sampled("g0", (1.0, 9.0, 0.0, 9.0)), sampled("g1", (3.0, 9.0, 0.0, 9.0))
    three, by_three = sampled("g2", (9.0,) * 4)
    three.failures = {0: "", 2: ""}
    plan, store = SealPlan(0, (one, three, two), ()), ArtifactStore(tmp_path)
    sealed = seal_batch(plan, {"g0": by_one, "g1": by_two, "g2": by_three}, Tally(), config, store)
    # Compared with their groups' means, 0.5 and 1.5, and divided by the deviation of all four.
    scale = np.sqrt((2 * 0.25 + 2 * 2.25) / 4)
    expected = [0.5, 0, -0.5, 0, 0, 0, 0, 0, 1.5, 0, -1.5, 0] / scale
    rows = read_batch(store.get(sealed.digest))[0]
    assert [row.advantage for row in rows] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("truncated", ["train", "mask"])
@pytest.mark.parametrize("filter_", ["none", "drop", "refill"])
def test_what_is_dropped_is_part_of_the_batchs_deviation_so_that_the_filter_changes_no_update(
    tmp_path: Path, filter_: str, truncated: str
) -> None:
    algorithm = {"deviation": "batch", "truncated_completions": truncated}
    config = build_config({"loop": {"filter": filter_}, "algorithm": algorithm})
    (one, by_one), (same, by_same) = sampled("g0", (1.0, 1.0, 0.0, 1.0)), sampled("g1", (1.0,) * 4)
    plan = SealPlan(0, (one, same), ()) if filter_ == "none" else SealPlan(0, (one,), (same,))
    store, given = ArtifactStore(tmp_path), {"g0": by_one}
    if truncated == "mask" or filter_ == "none":
        given["g1"] = by_same
    rows = read_batch(store.get(seal_batch(plan, given, Tally(), config, store).digest))[0]
    centred = np.array([0.25, 0.25, -0.75, 0.25] if truncated == "train" else [0.5, 0.0, -0.5, 0.0])
    counted = centred if truncated == "train" else centred[[0, 2]]
    if filter_ != "refill":
        counted = np.append(counted, np.zeros(len(counted)))
    assert [row.advantage for row in rows[:4]] == pytest.approx(centred / (counted.std(ddof=1) + 1e-6))


@pytest.mark.parametrize("filtered", [(), ("g0",)], ids=["a skipped step", "nothing that differs"])
def test_a_batch_without_groups_has_no_advantage_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filtered: tuple[str, ...]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    config, store = load_config(EXAMPLES / "reinforce_pp.yaml"), ArtifactStore(tmp_path)
    plan = SealPlan(0, (), tuple(sampled(name, (1.0,) * 4)[0] for name in filtered))
    sealed = seal_batch(plan, {}, Tally(), config, store)
    assert (sealed.trajectories, sealed.groups_filtered) == (0, len(filtered))


def test_what_environments_say_of_rewards_is_in_means_and_timings_and_in_no_batch(tmp_path: Path) -> None:
    (told, by_told), (silent, _) = sampled("g0", (1.0, 1.0, 0.0, 1.0)), sampled("g1", (1.0,) * 4)
    config, store = build_config({}), ArtifactStore(tmp_path)

    def seal() -> BatchSealed:
        return seal_batch(SealPlan(0, (told,), (silent,)), {"g0": by_told}, Tally(), config, store)

    plain = seal()
    told.said, told.parts, silent.parts = {1: "won; right 1"}, {"right": 0.75}, {"right": 0.25, "short": 1.0}
    found = seal()
    assert found.digest == plain.digest and plain.reward_parts == {}
    assert found.reward_parts == {"right": 0.5, "short": 1.0}
    said = [timing.said for timing in decode_timings(store.get(found.timings_digest))]
    assert said == ["", "won; right 1", "", ""]
    committed = StepCommitted(0, 1, "w", found.digest, {}, True, 1.0)
    line = step_line(committed, sealed_batch(found, (), ()), 1.0, None)
    assert step_metrics(line)["reward_part/short"] == 1.0


def test_with_refill_other_groups_have_the_places_of_those_left_out(tmp_path: Path) -> None:
    assert sealed(tmp_path, "refill", "train")[1] == []


def test_statistics_are_those_of_the_members_that_were_scored(tmp_path: Path) -> None:
    config = build_config({"loop": {"filter": "drop"}, "algorithm": {"normalise_advantages": False}})
    (used, by_used), (filtered, _) = sampled("g0", (1.0, 0.0, 0.0, 1.0)), sampled("g1", (0.0, 1.0, 1.0, 1.0))
    used.failures, filtered.failures = {1: "it took too long"}, {0: "out of memory", 2: "so too"}
    assert used.varied and not filtered.varied
    plan = SealPlan(0, (used,), (filtered,))
    store = ArtifactStore(tmp_path)
    event = seal_batch(plan, {"g0": by_used}, Tally(), config, store)
    assert event.reward_mean == pytest.approx((2 + 2) / (3 + 2))
    assert event.trajectories_failed == 3
    payload = store.get(event.digest)
    rows = decode_batch(payload)
    assert [row.failure for row in rows] == ["", "it took too long", "", ""]
    assert [row.advantage for row in rows] == pytest.approx([1 / 3, 0.0, -2 / 3, 1 / 3])
    assert read_batch(payload)[1] == [LeftOut("g1", 2, LENGTHS[1] + LENGTHS[3])]
