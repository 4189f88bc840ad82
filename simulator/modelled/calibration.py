"""Calibration: what a recorded run says of its engines, lengths, learner, broadcasts and prices.

All of it is measured by `core.capacity.loop_measures`, the code by which a run plans its own run-ahead, from
the journal of the run. It is a small YAML file, which `antiphon simulate --from-run RUN --keep FILE` writes.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import yaml
from pydantic import Field, ValidationError

from antiphon.core.capacity.loop_measures import LoopMeasures, fit_leases, token_s
from antiphon.core.config import RunConfig
from antiphon.core.config_errors import read_yaml, sentences
from antiphon.core.config_sections import Section
from antiphon.core.errors import ConfigError, InfeasibleError
from antiphon.core.loop import events as e
from antiphon.core.loop.events import load_event
from antiphon.core.loop.run_state import new_state
from antiphon.services.coordinator.journal.journal import Journal, journal_place

GROUPS_KEPT = 512
"""Newest groups of a run whose lengths are kept."""
MOST_EVENTS = 10**9
_LEASED = (e.LeaseGranted, e.LeaseExpired, e.GroupSubmitted)

TimedEvent = tuple[float, e.JournalEvent]
"""Second on the coordinator's clock, and what happened then."""


class SeenGroup(Section):
    """One training group as it was sampled and rewarded."""

    prompt: int = Field(ge=0)
    """Index in the training split."""
    tokens: tuple[int, ...] = Field(min_length=1)
    """Of each completion."""
    reward_s: float = Field(default=0.0, ge=0.0)
    """From its submission to its rewards, seconds."""
    varied: bool = True
    """Its rewards differ: with a filter only such groups train."""


class Calibration(Section):
    """How fast the parts of a loop are."""

    source: str = ""
    """The run that it was measured on."""
    alpha_s: float = Field(ge=0.0, le=60.0)
    """Seconds per token of a completion that a worker samples alone."""
    beta_s: float = Field(ge=0.0, le=60.0)
    """Seconds per token that each further completion of the same worker adds."""
    start_s: float = Field(default=0.0, ge=0.0, le=1e4)
    """Seconds of a lease besides those per token: until its first one, and from its last one until it is
    handed in."""
    between_s: float = Field(default=0.0, ge=0.0, le=1e4)
    """Seconds that a place of a worker is empty between two groups, where another one is there to be had."""
    concurrent_groups: int = Field(ge=1, le=4096)
    """Groups that a worker has room for."""
    learner_s: float = Field(gt=0.0, le=1e6)
    """Of a learner step of `step_tokens`, with its commit."""
    step_tokens: float = Field(gt=0.0)
    """Completion tokens of a batch."""
    learner_fixed_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of `learner_s` that a step takes whatever its tokens; the rest is proportional to them."""
    broadcast_s: float = Field(ge=0.0, le=1e6)
    """From a commit until the workers hold its version."""
    shared_cores: float | None = Field(default=None, gt=0.0, le=4096.0)
    """Cores that all workers and the learner share, where they run on one machine: what is busy beyond that
    slows all of it. Null: each has a machine of its own."""
    losses_per_hour: float = Field(default=0.0, ge=0.0, le=3600.0)
    """Sudden ends of one worker per hour of its life."""
    replaced_s: float = Field(default=600.0, gt=0.0, le=1e6)
    """Seconds until another one samples in its place."""
    worker_usd_per_hour: float = Field(default=0.0, ge=0.0, le=100_000.0)
    learner_usd_per_hour: float = Field(default=0.0, ge=0.0, le=100_000.0)
    groups: tuple[SeenGroup, ...] = Field(min_length=1)
    """Lengths by prompt."""

    def token_s(self, load: int) -> float:
        """Return the seconds per token of a completion, `load` of them being sampled by a worker at once."""
        return token_s(self.alpha_s, self.beta_s, load)

    def training_s(self, tokens: int) -> float:
        """Return the seconds of a learner step whose batch has this many completion tokens."""
        fixed = self.learner_fixed_share
        return self.learner_s * (fixed + (1.0 - fixed) * tokens / self.step_tokens)


def load_calibration(path: Path) -> Calibration:
    """Read a calibration.

    Raises:
        ConfigError: when it cannot be read, or a field is wrong; the sentence names it.
    """
    try:
        return Calibration.model_validate(read_yaml(path.read_text(encoding="utf-8")) or {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"cannot read the calibration {path}: {said}") from error
    except ValidationError as error:
        raise ConfigError(f"{path} is no calibration: {sentences(error, Calibration)}") from error


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration as `load_calibration` reads it."""
    tree = calibration.model_dump(mode="json")
    path.write_text(yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=110), "utf-8")


def calibrate(config: RunConfig, events: Iterable[TimedEvent], source: str = "") -> Calibration:
    """Return what the events of a recorded run say.

    Each worker is measured apart, so that its pace holds in fleets of other sizes, and one fit made over all
    leases.

    Args:
        config: of the run.
        events: of its journal, in order.
        source: what reports call it.

    Raises:
        InfeasibleError: when nothing was trained.
    """
    rows = list(events)
    state, whole, workers = new_state(config), LoopMeasures(), dict[str, LoopMeasures]()
    holders, places, lost = dict[str, str](), 0, 0
    for at_s, event in rows:
        match event:
            case e.LeaseGranted():
                holders[event.group_id] = event.worker_id
            case e.WorkerRegistered():
                workers.setdefault(event.worker_id, LoopMeasures())
                places = max(places, event.concurrent_groups)
            case e.WorkerLost():
                lost += 1
        if isinstance(event, _LEASED) and (one := workers.get(holders.get(event.group_id, ""))):
            one.observe(event, state, at_s)
        whole.observe(event, state, at_s)
        state.apply(event)
    end_s = rows[-1][0] if rows else 0.0
    pace = whole.pace(end_s)
    if pace is None:
        raise InfeasibleError("that run trained on no batch, so nothing can be measured by it; let it train")
    leases = [one.leases(end_s) for one in workers.values()]
    start_s, alpha_s, beta_s = fit_leases(*(np.concatenate(column) for column in zip(*leases, strict=True)))
    tokens = [batch.tokens for batch in state.sealed[: len(state.commits)] if batch.tokens]
    lived_s = state.work_accounts.account(state.clock.latest_s).total_s
    return Calibration(
        source=source,
        alpha_s=alpha_s,
        beta_s=beta_s,
        start_s=start_s,
        concurrent_groups=places,
        learner_s=pace.learner_s,
        step_tokens=float(np.mean(tokens)),
        learner_fixed_share=_fixed_share(rows),
        broadcast_s=pace.broadcast_s,
        losses_per_hour=3600.0 * lost / lived_s if lived_s and pace.losses else 0.0,
        worker_usd_per_hour=config.record.worker_usd_per_hour,
        learner_usd_per_hour=config.record.learner_usd_per_hour,
        groups=tuple(_seen_groups(rows)),
    )


def _fixed_share(rows: Sequence[TimedEvent]) -> float:
    """Return which share of a learner step does not depend on its tokens: a least-squares line through all
    steps but the first, which loads libraries. 0 where they say nothing."""
    sealed: dict[int, tuple[float, int]] = {}
    seconds, tokens, committed_s = list[float](), list[float](), 0.0
    for at_s, event in rows:
        if isinstance(event, e.BatchSealed):
            sealed[event.step] = (at_s, event.tokens)
        elif isinstance(event, e.StepCommitted) and event.step in sealed:
            sealed_s, count = sealed[event.step]
            if committed_s:
                seconds.append(at_s - max(sealed_s, committed_s))
                tokens.append(float(count))
            committed_s = at_s
    if len(set(tokens)) < 3:
        return 0.0
    slope, fixed = np.polyfit(tokens, seconds, 1)
    if slope <= 0.0:
        return 1.0
    return float(np.clip(fixed / np.mean(seconds), 0.0, 1.0))


def _seen_groups(rows: Sequence[TimedEvent]) -> list[SeenGroup]:
    prompts: dict[str, int] = {}
    submitted: dict[str, tuple[float, tuple[int, ...]]] = {}
    found = []
    for at_s, event in rows:
        match event:
            case e.GroupOpened():
                prompts[event.group_id] = event.prompt_index
            case e.GroupSubmitted() if event.group_id in prompts and min(event.token_counts) > 0:
                submitted[event.group_id] = (at_s, event.token_counts)
            case e.GroupRewarded() if event.group_id in submitted:
                then, tokens = submitted.pop(event.group_id)
                varied = min(event.rewards) < max(event.rewards)
                prompt = prompts[event.group_id]
                waited = max(0.0, round(at_s - then, 6))
                found.append(SeenGroup(prompt=prompt, tokens=tokens, reward_s=waited, varied=varied))
    return found[-GROUPS_KEPT:]


async def read_journal(directory: Path, config: RunConfig) -> list[TimedEvent]:
    """Return the events of the journal of a run that is not under way, with their times.

    Args:
        directory: of the run.
        config: of the run.
    """
    journal = Journal(journal_place(config, directory), directory.name)
    try:
        rows = await journal.read(0, MOST_EVENTS)
    finally:
        await journal.close()
    return [(row.at, load_event(row.kind, row.body)) for row in rows]
