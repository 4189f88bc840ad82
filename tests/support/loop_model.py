"""LoopModel: the coordinator's pure decisions driven by chance, without clock, journal or network.

Workers, judges, the learner and the flow are a handful of methods that a test calls in any
order. Tokens and rewards are functions of prompt, seeds and version, as on a real engine with
position-keyed sampling, so two histories of one configuration can be compared by batch digests.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from antiphon.core.config import RunConfig, build_config
from antiphon.core.digests import digest_bytes
from antiphon.core.loop import acceptance, admission, assembly
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import GroupPhase, GroupState
from antiphon.core.loop.run_state import RunState, fold
from antiphon.core.records import (
    FinishReason,
    GroupSubmission,
    SampleReward,
    SnapshotManifest,
    StepCommit,
    SubmitVerdict,
    Trajectory,
    VersionSpan,
)
from antiphon.core.seeds import derive_seed

RUN_ID = "run-1"
LEASE_KEY = bytes(32)
"""What lease ids are made with in tests."""
MAX_TOKENS = 6


def make_config(
    *,
    mode: str = "elastic",
    max_staleness: int = 2,
    publish_interval: int = 1,
    prompts_per_step: int = 3,
    filter_: str = "drop",
    refill_limit: float = 2.0,
    steps: int = 8,
    train_size: int = 10,
    evaluation_prompts: int = 3,
    evaluation_samples: int = 1,
    lease_s: float = 60.0,
    heartbeat_s: float = 2.0,
    group_size: int = 2,
    speculation: float = 0.05,
    quorum: float = 0.0,
) -> RunConfig:
    """Return a small configuration."""
    return build_config(
        {
            "run": {"steps": steps, "seed": 7},
            "environment": {"train_size": train_size, "heldout_size": evaluation_prompts},
            "evaluation": {"prompts": evaluation_prompts, "samples": evaluation_samples},
            "loop": {
                "mode": mode,
                "max_staleness": max_staleness,
                "publish_interval": publish_interval,
                "prompts_per_step": prompts_per_step,
                "group_size": group_size,
                "filter": filter_,
                "refill_limit": refill_limit,
            },
            "sampling": {"max_tokens": MAX_TOKENS},
            "coordinator": {
                "lease_s": lease_s,
                "heartbeat_s": heartbeat_s,
                "payload_retention_steps": 2,
                "speculation": speculation,
            },
            "broadcast": {"snapshots_kept": 16, "quorum": quorum},
        }
    )


def prompt_key(group: GroupState) -> str:
    return f"{group.split}-0-{group.prompt_index}"


def light_trajectory(seed: int, version: int, index: int, key: str) -> Trajectory:
    """Return what an engine with position-keyed sampling makes of a request."""
    rng = np.random.default_rng(derive_seed("light", seed, version, key))
    length = int(rng.integers(1, MAX_TOKENS + 1))
    return Trajectory(
        sample_index=index,
        seed=seed,
        token_ids=rng.integers(0, 50, length).astype(np.int32),
        logprobs=-rng.random(length).astype(np.float32),
        spans=(VersionSpan(version, 0, length),),
        finish_reason=FinishReason.LENGTH if length == MAX_TOKENS else FinishReason.STOP,
    )


def light_reward(token_ids: np.ndarray, dullness: int = 2) -> float:
    """Return 0 or 1; the higher the dullness, the more groups lack variance."""
    return float(int(token_ids.sum()) % (dullness + 1) == 0)


def empty_batch(step: int) -> e.BatchSealed:
    """Return the batch of a step that trains nothing."""
    digest = digest_bytes(repr([]).encode())
    return e.BatchSealed(step, (), (), digest, digest_bytes(b""), 0, 0, 0, 0, 0.0, 0.0, ())


def light_manifest(version: int, run_id: str = RUN_ID, origin: str = "127.0.0.1:1") -> SnapshotManifest:
    digest = digest_bytes(f"weights {version}".encode())
    return SnapshotManifest(run_id, version, digest, (), 0, (), origin)


@dataclass
class ModelWorker:
    """A worker: the version it holds and the leases it works on."""

    name: str
    held: int | None = None
    leases: list[e.LeaseGranted] = field(default_factory=list)


class LoopModel:
    """One run, in the hands of a test."""

    def __init__(self, config: RunConfig, workers: int = 2, dullness: int = 2) -> None:
        self.config = config
        self.dullness = dullness
        self.journal: list[e.JournalEvent] = []
        self.state = self.fresh()
        self.workers = [ModelWorker(f"w{i}") for i in range(workers)]
        self.submissions: dict[str, GroupSubmission] = {}
        self.batches: dict[int, tuple[tuple[object, ...], ...]] = {}
        """Per sealed step: the rows as the learner would see them."""
        self.sealed_ids: list[str] = []
        self.clock = 0.0
        self.committable = True
        self.ordering: Callable[[str], admission.Ordering] | None = None
        """How a worker's groups are chosen; None: as they come."""
        self.record(e.RunOpened(RUN_ID, {}), e.SnapshotAnnounced(0, light_manifest(0).weights_digest, "o"))

    def fresh(self) -> RunState:
        return RunState(
            group_size=self.config.loop.group_size,
            payload_retention_steps=self.config.coordinator.payload_retention_steps,
        )

    def record(self, *events: e.JournalEvent) -> None:
        for event in events:
            self.journal.append(e.load_event(event.kind, e.dump_event(event)))
            self.state.apply(event)

    def refolded(self) -> RunState:
        return fold(self.fresh(), self.journal)

    def settle(self) -> None:
        found: list[e.JournalEvent] = list(assembly.dropped(self.state, self.config))
        for step in self.state.unsealed_steps():
            found.extend(admission.refills(self.state, self.config, step))
        self.record(*found)

    # What the parties do.

    def open_step(self) -> bool:
        ahead = self.config.loop.max_staleness + 1
        limit = min(self.config.run.steps, len(self.state.commits) + ahead)
        if self.state.opened_steps >= limit:
            return False
        self.record(*admission.open_step(self.state, self.config, self.state.opened_steps))
        self.settle()
        return True

    def open_evaluation(self, version: int) -> bool:
        if version in self.state.evaluations or version not in self.state.snapshots:
            return False
        evaluation = self.config.evaluation
        self.record(e.EvaluationOpened(version, evaluation.prompts, evaluation.samples))
        return True

    def load(self, worker: ModelWorker, version: int) -> None:
        assert version in self.state.snapshots
        worker.held = version

    def plan(self, worker: ModelWorker, groups: int = 1) -> admission.LeasePlan:
        others = {w.held for w in self.workers if w is not worker and w.held is not None}
        ordering = None if self.ordering is None else self.ordering(worker.name)
        return admission.plan_leases(self.state, self.config, worker.held, groups, others, None, ordering)

    def lease(self, worker: ModelWorker, groups: int = 1) -> int:
        plan = self.plan(worker, groups)
        if self.config.loop.mode == "fixed":
            if plan.wanted_version in self.state.snapshots and not worker.leases:
                self.load(worker, plan.wanted_version)
                plan = self.plan(worker, groups)
        elif not worker.leases and worker.held != self.state.newest_version:
            self.load(worker, self.state.newest_version or 0)
            plan = self.plan(worker, groups)
        self.record(*plan.openings)
        for group_id in plan.group_ids:
            attempt = self.state.groups[group_id].attempt + 1
            lease_id = admission.lease_id_of(LEASE_KEY, group_id, attempt)
            grant = e.LeaseGranted(group_id, lease_id, worker.name, attempt, worker.held or 0, self.clock)
            self.record(grant)
            worker.leases.append(grant)
        return len(plan.group_ids)

    def lose(self, grant: e.LeaseGranted) -> None:
        group = self.state.groups.get(grant.group_id)
        if group is not None and group.phase is GroupPhase.LEASED and group.lease_id == grant.lease_id:
            self.record(e.LeaseExpired(grant.group_id, grant.lease_id, grant.worker_id, "test"))

    def sample(self, grant: e.LeaseGranted, version: int) -> GroupSubmission | None:
        group = self.state.groups.get(grant.group_id)
        if group is None:
            return None
        key = prompt_key(group)
        seeds = admission.group_seeds(self.config, group, key)
        return GroupSubmission(
            lease_id=grant.lease_id,
            group_id=grant.group_id,
            worker_id=grant.worker_id,
            trajectories=tuple(light_trajectory(s, version, i, key) for i, s in enumerate(seeds)),
            generation_s=0.1,
        )

    def submit(self, submission: GroupSubmission) -> SubmitVerdict:
        verdict = acceptance.early_verdict(self.state, submission)
        if verdict is not None:
            return verdict
        group = self.state.groups[submission.group_id]
        seeds = admission.group_seeds(self.config, group, prompt_key(group))
        verdict, found = acceptance.accept_submission(self.state, self.config, submission, seeds, self.clock)
        self.record(*found)
        if verdict is SubmitVerdict.ACCEPTED:
            self.submissions[submission.group_id] = submission
        return verdict

    def unrewarded(self) -> list[GroupState]:
        return [g for g in self.state.groups.values() if g.phase is GroupPhase.SUBMITTED]

    def judge(self, group: GroupState) -> None:
        trajectories = self.submissions[group.group_id].trajectories
        given = [
            SampleReward(index, light_reward(t.token_ids, self.dullness))
            for index, t in enumerate(trajectories)
        ]
        self.record(*acceptance.accept_rewards(self.state, group.group_id, given, "j", self.clock, 0.1))
        self.settle()

    def seal(self) -> bool:
        plan = assembly.plan_seal(self.state, self.config)
        if plan is None:
            return False
        rows: list[tuple[object, ...]] = []
        histogram: dict[int, int] = {}
        for group in plan.used:
            self.sealed_ids.append(group.group_id)
            for index, trajectory in enumerate(self.submissions[group.group_id].trajectories):
                staleness = plan.step - trajectory.oldest_version
                histogram[staleness] = histogram.get(staleness, 0) + 1
                tokens = tuple(trajectory.token_ids.tolist())
                rows.append((group.group_id, prompt_key(group), index, tokens, group.rewards[index]))
        tally = self.state.since_seal
        self.record(
            e.BatchSealed(
                step=plan.step,
                group_ids=tuple(group.group_id for group in plan.used),
                filtered_ids=tuple(group.group_id for group in plan.filtered),
                digest=digest_bytes(repr(rows).encode()),
                timings_digest=digest_bytes(b""),
                trajectories=len(rows),
                groups_filtered=len(plan.filtered) + len(tally.filtered),
                groups_dropped_stale=tally.groups_stale,
                tokens=0,
                reward_mean=0.0,
                completion_tokens_mean=0.0,
                staleness=tuple(sorted(histogram.items())),
            )
        )
        self.batches[plan.step] = tuple(rows)
        self.settle()
        return True

    def skip(self, step: int) -> None:
        found = assembly.skip_step(self.state, self.config.run.steps, empty_batch(step), "test", "operator")[
            1
        ]
        self.record(*found)
        self.batches[step] = ()
        self.settle()

    def commit(self) -> bool:
        step = len(self.state.commits)
        if not self.committable or not self.state.is_sealed(step):
            return False
        version = step + 1
        commit = StepCommit(
            step, version, light_manifest(version).weights_digest, self.state.sealed[step].digest
        )
        self.record(*acceptance.accept_commit(self.state, commit, self.clock))
        return True

    def publish(self) -> bool:
        """Announce the oldest version that is due and not announced."""
        interval = self.config.loop.publish_interval
        due = [v for v in range(0, len(self.state.commits) + 1, interval) if v not in self.state.snapshots]
        if not due:
            return False
        self.record(*acceptance.accept_snapshot(self.state, light_manifest(due[0])))
        return True

    @property
    def done(self) -> bool:
        return len(self.state.commits) == self.config.run.steps


def act(model: LoopModel, rng: np.random.Generator, faults: float) -> None:
    """Let chance choose one action of one party."""
    worker = model.workers[int(rng.integers(len(model.workers)))]
    choice = int(rng.integers(8))
    if rng.random() < faults:
        if worker.leases:
            grant = worker.leases[int(rng.integers(len(worker.leases)))]
            model.lose(grant)
            if rng.random() < 0.5:  # the worker is gone; otherwise it hands in late
                worker.leases.remove(grant)
        return
    if choice == 0:
        model.open_step()
    elif choice == 1:
        model.lease(worker, int(rng.integers(1, 4)))
    elif choice in (2, 3) and worker.leases:
        grant = worker.leases.pop(int(rng.integers(len(worker.leases))))
        submission = model.sample(grant, worker.held or 0)
        if submission is not None:
            model.submit(submission)
            if rng.random() < faults:
                assert model.submit(submission) is not SubmitVerdict.ACCEPTED
    elif choice == 4 and (waiting := model.unrewarded()):
        model.judge(waiting[int(rng.integers(len(waiting)))])
    elif choice == 5:
        model.seal()
    elif choice == 6:
        model.commit()
    elif choice == 7:
        model.publish()


def run_to_end(model: LoopModel, rng: np.random.Generator, faults: float, most: int = 20_000) -> int:
    """Act at random until every step is committed; fail when the loop no longer moves."""
    for count in range(most):
        if model.done:
            return count
        act(model, rng, faults)
    raise AssertionError(
        f"no end after {most} actions: {len(model.state.commits)} commits, {model.state.next_seal} sealed, "
        f"{[(g.group_id, str(g.phase), g.version) for g in model.state.groups.values()]}"
    )
