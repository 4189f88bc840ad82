"""Outcome: the results of a finished run, for people and for `dvc repro`.

metrics.json holds only what the configuration decides (in fixed mode it repeats byte for
byte); clocks, memory and restarts go to timings.json, and so does what drafting did, which
depends on the completions that happened to be finished when a draft was made.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from antiphon.core.errors import AntiphonError
from antiphon.core.records import StepCommit
from antiphon.core.reporting.alarms import ALARMS, StepAlarms
from antiphon.core.reporting.figures import RunFigures, share
from antiphon.core.status import RunStatus
from antiphon.runs.samples import samples_of
from antiphon.system.files import write_atomically
from antiphon.system.set_up import command

EPOCHS_SAID = 6
"""Epochs named at either end of a run with many."""
SHOWN = 3
"""Completions shown of a run that taught nothing."""
LONGEST = 100
"""Characters of a prompt or an answer in a line; `antiphon evaluate --samples` has all."""


@dataclass(frozen=True, slots=True)
class StageSpan:
    """When one stage ran, in seconds of `time.perf_counter`; for reports and benchmarks."""

    stage: str
    number: int
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A finished run in numbers."""

    run_id: str
    run_dir: str
    weights_digest: str
    figures: RunFigures
    total_s: float
    """Seconds from the start of the services to the outcome, of the process that finished the run."""
    restarts: dict[str, int] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)
    """How far each sink was (see `lineage.records`)."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU seconds by kind of process (`system.cpu_time`), of those that the finishing process started."""
    drafting: dict[str, Any] = field(default_factory=dict)
    """What drafting did, in all and under `by_epoch` (see `core.drafting.statistics`); {} without it."""
    no_signal: list[str] = field(default_factory=list)
    """What is said of a run none of whose steps trained anything (`closing_lines`); [] of any other."""

    unscored: str = ""
    """How many answers could not be scored and why the last one; empty where all could."""

    @property
    def exit_code(self) -> int:
        """Return 0 for a run at least one of whose steps trained, else 1."""
        return 1 if self.no_signal else 0

    def summary(self) -> dict[str, Any]:
        """Return plain values, as Prefect and outcome.json keep them."""
        return {**asdict(self), "figures": self.figures.plain()}

    @classmethod
    def from_summary(cls, plain: Mapping[str, Any]) -> Self:
        """Rebuild an outcome from its plain values; what is not known here is left out."""
        known = {name: plain[name] for name in (f.name for f in fields(cls)) if name in plain}
        return cls(**{**known, "figures": RunFigures.from_plain(plain["figures"])})

    def lines(self, report: Path) -> list[str]:
        """Return the outcome in a few lines, the report and `antiphon up` last."""
        first, *rest = self.figures.lines()
        antiphon = command()
        said = [f"run {self.run_id}: {first}", *rest]
        if self.drafting:
            said.append(f"drafts right by epoch: {epochs_words(self.drafting['by_epoch'])}")
        if waiting := self.records.get("uploads", {}).get("pending", 0):
            said.append(
                f"{waiting} artifacts are not in the remote store yet: {antiphon} keep --remote sends them"
            )
        if self.unscored:
            said.append(self.unscored)
        said.append(f"final weights {self.weights_digest}")
        said += self.no_signal
        if any(writer["name"] == "ledger" for writer in self.records.get("writers", ())):
            said.append(f"for git and for others to pull: {antiphon} keep {self.run_id}")
        said.append(f"report: {report}")
        said.append(f"answers: {antiphon} evaluate {self.run_id} --samples")
        said.append(f"the model as a folder: {antiphon} export {self.run_id} best FOLDER")
        said.append(
            f"beside another run: {antiphon} report {self.run_id} OTHER   ({antiphon} runs lists them)"
        )
        said.append(
            f"look around: {antiphon} up   (Prefect and MLflow pages; {antiphon} up --stop stops them)"
        )
        return said


def epochs_words(by_epoch: Sequence[Mapping[str, Any]]) -> str:
    """Return how often drafts were right in each epoch; of many epochs, in the first and last ones.

    >>> epochs_words([{"epoch": 0, "acceptance": 0.25}, {"epoch": 1, "acceptance": 0.75}])
    '0: 25.0%, 1: 75.0%'
    """
    epochs = [f"{entry['epoch']}: {share(entry['acceptance'])}" for entry in by_epoch]
    if len(epochs) > 2 * EPOCHS_SAID:
        epochs = [*epochs[:EPOCHS_SAID], "...", *epochs[-EPOCHS_SAID:]]
    return ", ".join(epochs)


def closing_lines(shown: StepAlarms, run_dir: Path, home: Path, max_tokens: int | None = None) -> list[str]:
    """Return what the end of a run says when none of its steps trained anything; nothing when one did.

    First a sentence with the fix, then a few completions of the newest version that has any.
    """
    if not shown.count or len(shown.idle) < shown.count:
        return []
    fix = next(kind.fix for kind in ALARMS if kind.name == "no_signal")
    said = [f"no_signal: this run taught nothing; {shown.idle_words(max_tokens)}; {fix}"]
    try:
        found = samples_of(run_dir, home, count=1)[:SHOWN]
    except AntiphonError as error:
        return [*said, f"its completions cannot be shown: {error}"]
    for sample in found:
        reason = f" ({sample.reason})" if sample.reason else ""
        said.append(f"  reward {sample.reward:g}: {_short(sample.prompt)} -> {_short(sample.answer)}{reason}")
    return [*said, f"more of them: {command()} evaluate {run_dir.name} --samples"] if found else said


def _short(text: str) -> str:
    plain = repr(" ".join(text.split()))
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST // 2]} ... {plain[-LONGEST // 2 :]}"


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
        "pass_before": outcome.figures.reward_first,
        "pass_after": outcome.figures.reward_last,
        "staleness": outcome.figures.plain()["staleness_histogram"],
        "weights": outcome.weights_digest,
    }
    timings = {
        **{k: v for k, v in outcome.summary().items() if k not in {"weights_digest", "run_dir"}},
        "stages": [asdict(span) for span in spans],
    }
    final = {"version": outcome.figures.steps, "weights": outcome.weights_digest}
    for name, content in (("metrics", metrics), ("timings", timings), ("final", final)):
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        write_atomically(folder / f"{name}.json", text.encode())
