"""Figures of a run: from the lines of its run log alone, whatever came between them."""

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.core.config import RunConfig, build_config
from antiphon.core.records import DraftingStatistics
from antiphon.core.reporting.figures import FIGURES, RunFigures, figures_of, totals_of

GROUP = 4


def config(**record: float) -> RunConfig:
    return build_config({"record": record, "loop": {"group_size": GROUP}, "rollout": {"workers": 2}})


def line(step: int, drafted: int = 10, accepted: int = 5, **timings: Any) -> dict[str, Any]:
    """Six groups of four completions of 10 tokens, two of them filtered."""
    batch = {
        "groups": 4,
        "groups_filtered": 2,
        "groups_dropped_stale": 1,
        "tokens": 160,
        "tokens_dropped_stale": 40,
        "completion_tokens_mean": 10.0,
        "staleness_histogram": {"0": 12, "1": 4},
    }
    drafting = DraftingStatistics(240, 120, drafted, drafted, accepted, 0, 0.0, 0.0, 2.0)
    clocks = {
        "at": 1000.0 + step,
        "wall_s": 10.0 * (step + 1),
        "train_s": 4.0,
        "startup_s": 30.0,
        "drafting": dataclasses.asdict(drafting),
    }
    return {"step": step, "version": step + 1, "batch": batch, "metrics": {}, "timings": clocks | timings}


def evaluation(version: int, reward: float) -> dict[str, Any]:
    return {"version": version, "prompts": 8, "reward_mean": reward, "completion_tokens_mean": 12.5}


HELD = [evaluation(0, 0.125), evaluation(2, 0.75), evaluation(3, 0.625)]


def test_every_figure_of_three_steps() -> None:
    steps = [line(0), line(1, drafted=90, accepted=85), line(2)]
    found = figures_of(steps, HELD, config(worker_usd_per_hour=60.0))
    assert found == RunFigures(
        steps=3,
        wall_s=30.0,
        seconds_per_step=10.0,
        startup_s=30.0,
        dollars=1.0,
        dollars_per_step=1.0 / 3.0,
        dollars_per_million_tokens=1e6 / 480,
        dollars_per_reward_point=1.0 / 62.5,
        learner_busy_share=0.4,
        learner_idle_share=0.6,
        groups_trained=12,
        groups_filtered=6,
        groups_filtered_share=6 / 21,
        groups_dropped_stale=3,
        groups_dropped_stale_share=3 / 21,
        tokens_sampled=840,
        tokens_trained=480,
        tokens_filtered=240,
        tokens_dropped_stale=120,
        tokens_evaluated=300,
        tokens_per_s=28.0,
        staleness_mean=0.25,
        staleness_max=1,
        staleness_histogram={0: 36, 1: 12},
        drafting_acceptance=95 / 110,  # of all drafted tokens, not the mean of the steps
        drafting_tokens_per_pass=2.0,
        drafting_gain=2.0,
        reward_first=0.125,
        reward_last=0.625,
        reward_best=0.75,
        reward_best_error=found.reward_best_error,
        best_version=2,
        best_is_noise=True,
    )
    assert RunFigures.from_plain(json.loads(json.dumps(found.plain()))) == found


def test_a_figure_is_written_in_one_way_everywhere() -> None:
    found = figures_of([line(0), line(1), line(2)], HELD, config(worker_usd_per_hour=60.0))
    said = "\n".join(found.lines())
    rows = dict(found.rows())
    for figure in FIGURES:
        assert rows[figure.label] == found.text(figure.name) == figure.write(found.numbers()[figure.name])
        if figure.name not in {"breaks", "break_s", "dollars", "tokens_dropped_stale", "drafting_gain"}:
            assert found.text(figure.name) in said, figure.name
    assert "12.5%" in said and "30.0 s" in said and "1 s" not in said


def test_what_is_not_known_is_not_said() -> None:
    nothing = figures_of([], [], config())
    assert nothing == RunFigures()
    assert "–" in nothing.lines()[0] and "pass@1" not in "\n".join(nothing.lines())
    assert "drafts right" not in dict(nothing.rows())
    earlier = line(0)  # as versions wrote it that did not keep these
    earlier["timings"] = {"at": 1.0, "wall_s": 5.0}
    assert figures_of([earlier], [], config()).drafting_acceptance is None
    earlier["batch"] = None
    assert figures_of([earlier], [], config()).tokens_sampled == 0


def test_a_line_that_came_early_counts_once_those_before_it_are_there() -> None:
    lines = [line(step) for step in range(6)]
    early = [*lines[:2], *lines[3:]]
    assert totals_of(early, config()) == totals_of(lines[:2], config()) == totals_of(lines, config())[:3]
    assert figures_of(early, HELD, config()) == figures_of(lines[:2], HELD, config())


def test_the_page_defines_every_figure_as_the_code_does() -> None:
    page = (Path(__file__).parents[3] / "docs" / "concepts" / "figures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^|]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([TRMP ]+) \|$", page, re.MULTILINE)
    assert [row[:4] for row in rows] == [(f.name, f.label, f.unit, f.meaning) for f in FIGURES]
    found = figures_of([line(0, breaks=1, break_s=77.7)], HELD, config(worker_usd_per_hour=60.0))
    found = replace(found, **{f.name: 1000 + i for i, f in enumerate(FIGURES)})  # type: ignore[arg-type]
    said = "\n".join(found.lines())
    for (name, *_, where), figure in zip(rows, FIGURES, strict=True):
        assert (figure.write(getattr(found, name)) in said) == where.startswith("T"), name


def test_a_best_score_is_told_with_its_interval_and_when_it_is_noise() -> None:
    def said(*scores: float) -> tuple[float | None, str]:
        held = [
            {"version": v, "reward_mean": score, "prompts": 256, "completion_tokens_mean": 1.0}
            for v, score in enumerate(scores)
        ]
        found = figures_of([line(0), line(1), line(2)], held, config())
        return found.reward_best_error, "\n".join(found.lines())

    error, words = said(0.1, 0.5, 0.48)
    assert error == pytest.approx(1.96 * (0.25 / 256) ** 0.5)
    assert "the best is 50.0% ± 6.1% (95%), of version 1, which is within noise of the last one" in words
    assert "noise" not in said(0.1, 0.5, 0.3)[1], "the last one is worse"
    assert "noise" not in said(0.1, 0.3, 0.5)[1], "the last one is the best"


def test_rewards_of_another_range_are_numbers_everywhere() -> None:
    held = [evaluation(0, -12.5) | {"reward_range": [-100.0, 100.0], "samples": 4, "best_of_k": 3.0}]
    held.append(held[0] | {"version": 2, "reward_mean": 37.0})
    found = figures_of([line(0), line(1)], held, config())
    assert found.reward_range == (-100.0, 100.0) and found.tokens_evaluated == 2 * 8 * 4 * 12.5
    assert (found.text("reward_first"), found.text("reward_best")) == ("-12.5", "37")
    assert found.text("reward_best_error") == f"± {1.96 * (137.0 * 63.0 / 8) ** 0.5:,.4g}"
    said = "\n".join([*found.lines(), *(" ".join(row) for row in found.rows())])
    assert "held-out reward went from -12.5 to 37" in said and "pass@1" not in said
    assert RunFigures.from_plain(json.loads(json.dumps(found.plain()))) == found
    usual = figures_of([line(0)], HELD, config())
    assert "reward_range" not in usual.plain() and RunFigures.from_plain(usual.plain()) == usual
