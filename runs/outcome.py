"""Outcome: the results of a finished run, for people and for `dvc repro`.

metrics.json holds only what the configuration decides (in fixed mode it repeats byte for
byte); clocks, memory and restarts go to timings.json, and so does what drafting did, which
depends on the completions that happened to be finished when a draft was made.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from antiphon.core.records import StepCommit
from antiphon.core.status import RunStatus
from antiphon.runs.context import RunContext, StageSpan
from antiphon.services.learner.api import LearnerStatus
from antiphon.system.files import write_atomically

EPOCHS_SAID = 6
"""Epochs named at either end of a run with many."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A finished run in numbers."""

    run_id: str
    run_dir: str
    steps: int
    weights_digest: str
    pass_before: float | None
    """Held-out pass@1 of the first evaluated version, 0..1."""
    pass_after: float | None
    """Held-out pass@1 of the last evaluated version, 0..1."""
    staleness_histogram: dict[int, int]
    """Staleness in versions -> trajectories over all batches."""
    dropped_stale_share: float
    """Share of finished groups that were dropped beyond the bound."""
    loop_s: float
    """Seconds from the first stage's submission to the last one's end."""
    total_s: float
    """Seconds from the start of the services to the outcome."""
    learner_idle_share: float
    """Share of the learner's seconds, from its first step to its last, spent waiting."""
    restarts: dict[str, int] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)
    """What recording cost (see `lineage.recorder`)."""
    drafting: dict[str, Any] = field(default_factory=dict)
    """What drafting did, in all and under `by_epoch` (see `core.drafting.statistics`); {} without it."""
    no_signal: list[str] = field(default_factory=list)
    """What is said of a run none of whose steps trained anything (`runs.no_signal`); [] of any other."""

    @property
    def exit_code(self) -> int:
        """Return 0 for a run at least one of whose steps trained, else 1."""
        return 1 if self.no_signal else 0

    def summary(self) -> dict[str, Any]:
        """Return plain values, as Prefect and outcome.json keep them."""
        plain = asdict(self)
        plain["staleness_histogram"] = {str(k): v for k, v in self.staleness_histogram.items()}
        return plain

    @classmethod
    def from_summary(cls, plain: Mapping[str, Any]) -> Self:
        """Rebuild an outcome from its plain values."""
        values = dict(plain)
        values["staleness_histogram"] = {int(k): v for k, v in plain["staleness_histogram"].items()}
        return cls(**values)

    def lines(self, report: Path) -> list[str]:
        """Return the outcome in a few lines, the report and `antiphon up` last."""
        said = [f"run {self.run_id}: {self.steps} steps in {self.loop_s:.0f} s"]
        if self.pass_before is not None and self.pass_after is not None:
            said.append(f"held-out pass@1 went from {self.pass_before:.3f} to {self.pass_after:.3f}")
        worst = max(self.staleness_histogram, default=0)
        said.append(
            f"staleness at most {worst}, {self.dropped_stale_share:.1%} of groups dropped, "
            f"learner idle {self.learner_idle_share:.1%} of its time"
        )
        if self.drafting:
            said.append(drafting_line(self.drafting))
        if waiting := self.records.get("uploads", {}).get("pending", 0):
            said.append(f"{waiting} artifacts are not in the remote store yet: ./antiphon push sends them")
        said.append(f"final weights {self.weights_digest}")
        said += self.no_signal
        said.append(f"report: {report}")
        said.append("look around: ./antiphon up   (Prefect and MLflow pages; ./antiphon down stops them)")
        return said


def summarise(
    run: RunContext,
    *,
    status: RunStatus,
    learner: LearnerStatus,
    commits: Sequence[StepCommit],
    loop_s: float,
    total_s: float,
    restarts: dict[str, int],
    records: dict[str, Any],
    drafting: dict[str, Any],
    no_signal: list[str],
) -> RunOutcome:
    """Make the outcome from what the services report at the end."""
    finished = status.scores
    used = sum(status.staleness_histogram.values()) / run.config.loop.group_size
    seen = used + status.groups_dropped_stale + status.groups_filtered
    measured = learner.idle_s + learner.busy_s
    return RunOutcome(
        run_id=run.run_id,
        run_dir=str(run.run_dir),
        steps=len(commits),
        weights_digest=commits[-1].weights_digest if commits else "",
        pass_before=finished[0].reward_mean if finished else None,
        pass_after=finished[-1].reward_mean if finished else None,
        staleness_histogram=dict(status.staleness_histogram),
        dropped_stale_share=status.groups_dropped_stale / seen if seen else 0.0,
        loop_s=loop_s,
        total_s=total_s,
        learner_idle_share=learner.idle_s / measured if measured else 0.0,
        restarts=restarts,
        records=records,
        drafting=drafting,
        no_signal=no_signal,
    )


def drafting_line(drafting: Mapping[str, Any]) -> str:
    """Return how often drafts were right, in all and by epoch; of many epochs the first and last ones.

    >>> drafting_line({"acceptance": 0.5, "tokens_per_pass": 2.0, "by_epoch": [
    ...     {"epoch": 0, "acceptance": 0.25}, {"epoch": 1, "acceptance": 0.75}]})
    'drafting: 50.0% of drafts right, 2.00 tokens per pass; by epoch 0: 25.0%, 1: 75.0%'
    """
    epochs = [f"{entry['epoch']}: {entry['acceptance']:.1%}" for entry in drafting["by_epoch"]]
    if len(epochs) > 2 * EPOCHS_SAID:
        epochs = [*epochs[:EPOCHS_SAID], "...", *epochs[-EPOCHS_SAID:]]
    return (
        f"drafting: {drafting['acceptance']:.1%} of drafts right, {drafting['tokens_per_pass']:.2f} tokens "
        f"per pass; by epoch {', '.join(epochs)}"
    )


def write_results(
    outcome: RunOutcome,
    folder: Path,
    commits: Sequence[StepCommit],
    status: RunStatus,
    spans: Sequence[StageSpan],
) -> None:
    """Write metrics.json (decided by the configuration), timings.json and final.json."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics = {
        "steps": [
            {
                "step": commit.step,
                "loss": commit.metrics.get("loss"),
                "reward": commit.metrics.get("reward_mean"),
                "batch": commit.batch_digest,
                "weights": commit.weights_digest,
            }
            for commit in commits
        ],
        "evaluations": [
            {"version": e.version, "pass_at_1": e.reward_mean, "tokens": e.completion_tokens_mean}
            for e in status.scores
        ],
        "pass_before": outcome.pass_before,
        "pass_after": outcome.pass_after,
        "staleness": {str(k): v for k, v in sorted(outcome.staleness_histogram.items())},
        "weights": outcome.weights_digest,
    }
    timings = {
        **{k: v for k, v in outcome.summary().items() if k not in {"weights_digest", "run_dir"}},
        "stages": [asdict(span) for span in spans],
    }
    final = {"version": outcome.steps, "weights": outcome.weights_digest}
    for name, content in (("metrics", metrics), ("timings", timings), ("final", final)):
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        write_atomically(folder / f"{name}.json", text.encode())
