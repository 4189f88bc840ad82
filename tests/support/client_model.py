"""ClientModel: a coordinator's decisions for a run that a client drives, with workers that are plain records.

Workers load what the production rule says, at once and never a version that is lost. Their tokens are a
function of seed and version. The journal is a list, so a restart folds it again.
"""

from dataclasses import dataclass, field

import numpy as np

from antiphon.core.checks import TokenRules
from antiphon.core.client_records import CLIENT, SampleRequest
from antiphon.core.config import RunConfig, build_config
from antiphon.core.coordinator import client_groups, consequences, groups, leases, steps, workers
from antiphon.core.coordinator.loop_state import Decision, Forget, Keep, LoopState, prefix_name
from antiphon.core.digests import digest_bytes
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.loop.partials import KeptGroup
from antiphon.core.loop.run_state import fold
from antiphon.core.records import (
    PROTOCOL_VERSION,
    FinishReason,
    GroupSubmission,
    Lease,
    LeaseProgress,
    PartialTrajectory,
    Prompt,
    SamplingParameters,
    SnapshotManifest,
    StepCommit,
    SubmitVerdict,
    Trajectory,
    VersionSpan,
)
from antiphon.core.requests import LeaseReply, LeaseRequest, WorkerHeartbeat, WorkerHello
from antiphon.core.seeds import derive_seed
from antiphon.services.rollout.swap import WeightView, leases_wait, version_to_load

RUN_ID = "run-1"
VOCABULARY, END_TOKEN = 50, 0


def client_config(**sections: dict[str, object]) -> RunConfig:
    """Return the configuration of a small run that a client drives."""
    tree: dict[str, dict[str, object]] = {
        "run": {"steps": 100, "seed": 7},
        "environment": {"name": CLIENT},
        "loop": {"group_size": 2, "max_staleness": 2},
        "rollout": {"concurrent_groups": 4, "max_model_tokens": 64},
        "sampling": {"max_tokens": 8},
        "coordinator": {"lease_s": 60.0, "heartbeat_s": 2.0},
        "broadcast": {"snapshots_kept": 8},
        "door": {"future_ttl_s": 50.0},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return build_config(tree)


class ClientTokens:
    """What is known of the tokens, and no prompts."""

    rules = TokenRules(VOCABULARY, frozenset({END_TOKEN}))

    def prompt(self, split: str, index: int) -> Prompt:
        raise AssertionError("clients bring the prompts")


def asking(name: str, version: int | None = None, samples: int = 1, **fields: object) -> SampleRequest:
    """Return a request for completions of up to 6 tokens."""
    seeds = tuple(derive_seed("client", name, index) for index in range(samples))
    given: dict[str, object] = {"sampling": SamplingParameters(max_tokens=6), **fields}
    return SampleRequest(name, (1, 2, 3), seeds, version=version, **given)  # type: ignore[arg-type]


def token_at(seed: int, version: int, place: int) -> int:
    """Return the token of a completion."""
    return derive_seed("token", seed, version, place) % VOCABULARY


def completion(lease: Lease, index: int, version: int, before: PartialTrajectory | None = None) -> Trajectory:
    """Return a whole completion, which goes on behind what was there before."""
    sampling, seed = lease.sampling, lease.seeds[index]
    tokens: list[int] = [] if before is None else before.token_ids.tolist()
    spans = () if before is None else before.spans
    start, ends = len(tokens), {END_TOKEN, *sampling.stop_token_ids}
    while len(tokens) < sampling.max_tokens and not (tokens and tokens[-1] in ends):
        tokens.append(token_at(seed, version, len(tokens)))
    if len(tokens) > start:
        last = spans[-1] if spans else None
        begin = last.start if last is not None and last.version == version else start
        spans = (*(span for span in spans if span.start != begin), VersionSpan(version, begin, len(tokens)))
    reason = FinishReason.STOP if tokens[-1] in ends else FinishReason.LENGTH
    ids = np.array(tokens, dtype=np.int32)
    return Trajectory(ids, np.full(ids.size, -0.5, np.float32), spans, reason, sample_index=index, seed=seed)


@dataclass
class ModelWorker:
    """A worker: what it holds, and what it samples."""

    name: str
    worker_id: str = ""
    held: int | None = None
    wanted: int | None = None
    newest: int | None = None
    leases: dict[str, Lease] = field(default_factory=dict)
    tokens: int = 0

    def view(self, lost: set[int]) -> WeightView:
        pinned = sum(lease.version is not None for lease in self.leases.values())
        complete = {v for v in range((-1 if self.newest is None else self.newest) + 1)} - lost
        return WeightView(self.held, complete, self.newest, self.wanted, pinned, len(self.leases) - pinned)


class ClientModel:
    """The decisions of one run, its journal, and what the journal keeps."""

    def __init__(self, config: RunConfig, names: tuple[str, ...] = ("a", "b")) -> None:
        self.config, self.now = config, 0.0
        self.events: list[e.JournalEvent] = []
        self.payloads: dict[str, object] = {}
        self.workers = [ModelWorker(name) for name in names]
        self.answers: dict[str, list[GroupSubmission]] = {}
        """What was accepted, by group."""
        self.lost: set[int] = set()
        """Versions that nobody can fetch any more."""
        self.loop = LoopState(config, RUN_ID, ClientTokens(), bytes(32), self.now)
        self.run(_all(e.RunOpened(RUN_ID, {}, self.now)))

    def run(self, decision: Decision):  # type: ignore[type-arg,no-untyped-def]
        """Apply what a decision yields, as the executor does, and return its reply."""
        try:
            while True:
                effect = next(decision)
                if isinstance(effect, e.JournalEvent):
                    # What the journal says is what a restart sees.
                    assert e.load_event(effect.kind, e.dump_event(effect)) == effect
                    self.loop.apply(effect, self.now)
                    self.events.append(effect)
                elif isinstance(effect, GroupSubmission):
                    self.payloads[effect.group_id] = effect
                    self.answers.setdefault(effect.group_id, []).append(effect)
                elif isinstance(effect, Keep):
                    self.payloads[effect.name] = effect.record
                elif isinstance(effect, Forget) and not effect.only_at_hand:
                    for name in effect.names:
                        self.payloads.pop(name, None)
        except StopIteration as ended:
            return ended.value

    def restart(self) -> None:
        """Begin again from the journal."""
        before = self.loop.run
        self.loop = LoopState(self.config, RUN_ID, ClientTokens(), bytes(32), self.now)
        fold(self.loop.run, self.events)
        assert self.loop.run == before
        for group in self.loop.run.groups.values():
            kept = self.payloads.get(prefix_name(group.group_id)) if group.attempt else None
            assert kept is None or isinstance(kept, KeptGroup)
            if group.phase is GroupPhase.LEASED:
                self.loop.leases.begin(group.lease_id, group, group.worker_id, self.now, kept)
            elif kept is not None:
                self.loop.leases.partial_groups.wait(group.group_id, kept)
        for worker in self.workers:
            worker.worker_id = ""
        self.run(_all(e.RunResumed(self.now, 0.0)))

    def ask(self, request: SampleRequest) -> None:
        self.run(client_groups.request(self.loop, request, self.now))

    def make_version(self) -> None:
        """Take the next step and announce what it made; the first call announces version 0."""
        step = len(self.loop.run.commits)
        if self.loop.run.newest_version is not None:
            digest, empty = digest_bytes(f"step {step}".encode()), digest_bytes(b"")
            batch = e.BatchSealed(step, (), (), digest, empty, 3, 0, 0, 12, 0.0, 4.0, ())
            reference = self.run(client_groups.seal(self.loop, batch))
            assert reference == self.run(client_groups.seal(self.loop, batch))  # a repetition
            commit = StepCommit(step, step + 1, f"{step + 1:064x}", reference.digest, {}, True)
            self.run(steps.commit(self.loop, commit, self.now))
        version = len(self.loop.run.commits)
        manifest = SnapshotManifest(RUN_ID, version, f"{version:064x}", (), 0, (), "127.0.0.1:1")
        self.run(steps.announce(self.loop, manifest))

    def load(self, worker: ModelWorker) -> None:
        version = version_to_load(worker.view(self.lost), "elastic")
        worker.held = worker.held if version is None else version

    def beat(self, worker: ModelWorker, rng: np.random.Generator | None = None) -> None:
        """Send a heartbeat, with a few tokens of each lease where there is a generator."""
        self._register(worker)
        progress = []
        for lease in worker.leases.values() if rng is not None and worker.held is not None else ():
            pieces = []
            for index in range(len(lease.seeds)):
                before = next((one for one in lease.prefix if one.sample_index == index), None)
                whole = completion(lease, index, worker.held or 0, before)
                cut = int(rng.integers(0, len(whole.token_ids))) if rng is not None else 0
                if cut > (0 if before is None else before.stop):
                    spans = tuple(
                        VersionSpan(s.version, s.start, min(s.stop, cut))
                        for s in whole.spans
                        if s.start < cut
                    )
                    part = whole.token_ids[:cut], whole.logprobs[:cut], spans, None
                    pieces.append(PartialTrajectory(*part, sample_index=index))
            progress.append(LeaseProgress(lease.lease_id, tuple(pieces)))
        digest = None if worker.held is None else self.loop.run.snapshots.get(worker.held)
        worker.tokens += 1
        said = WorkerHeartbeat(
            worker.worker_id,
            worker.held,
            digest,
            tuple(worker.leases),
            worker.tokens,
            0.0,
            0.0,
            progress=tuple(progress),
            numerics="model",
        )
        reply, _ = self.run(workers.heartbeat(self.loop, said, self.now, 0.0, False))
        worker.newest, worker.wanted = reply.newest_version, reply.wanted_version
        for lease_id in reply.cancelled_leases:
            worker.leases.pop(lease_id, None)

    def lease(self, worker: ModelWorker, room: int = 4) -> int:
        """Ask for leases as a worker does; return how many there are."""
        self._register(worker)
        if leases_wait(worker.view(self.lost), "elastic") or len(worker.leases) >= room:
            return 0
        asked = LeaseRequest(worker.worker_id, worker.held, room - len(worker.leases), 0.0)
        found = self.run(leases.grant(self.loop, asked, self.now, True, False))
        reply = found if isinstance(found, LeaseReply) else found.reply
        for lease in reply.leases:
            assert lease.version in (None, worker.held)
            worker.leases[lease.lease_id] = lease
        worker.wanted = reply.wanted_version
        if reply.leases:
            member = self.loop.fleet.get(worker.worker_id)
            assert member is not None
            worker.wanted = self.loop.news_for(member)
        worker.newest = self.loop.run.newest_version
        return len(reply.leases)

    def submit(self, worker: ModelWorker, lease_id: str) -> SubmitVerdict:
        lease = worker.leases.pop(lease_id)
        assert worker.held is not None
        prefix = {piece.sample_index: piece for piece in lease.prefix}
        done = tuple(completion(lease, i, worker.held, prefix.get(i)) for i in range(len(lease.seeds)))
        handed_in = GroupSubmission(lease_id, lease.group_id, worker.worker_id, done, 0.1)
        verdict: SubmitVerdict = self.run(self._submit(handed_in))
        return verdict

    def _submit(self, handed_in: GroupSubmission) -> Decision[SubmitVerdict]:
        verdict = yield from groups.submit(self.loop, handed_in, self.now)
        if verdict is SubmitVerdict.ACCEPTED:
            yield from client_groups.finish(self.loop, handed_in)
        return verdict

    def vanish(self, worker: ModelWorker) -> None:
        """Lose a worker and all that it was sampling; its successor has nothing."""
        if (member := self.loop.fleet.get(worker.worker_id)) is not None:
            self.run(consequences.lose(self.loop, member, "gone", self.now))
        worker.worker_id, worker.leases, worker.held, worker.wanted = "", {}, None, None

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.run(consequences.overdue(self.loop, self.now))
        self.run(client_groups.overdue(self.loop, self.now))

    def work_off(self, rounds: int = 200) -> None:
        """Let all workers work without further faults until nothing is asked for any more."""
        for _ in range(rounds):
            if not self.loop.run.groups:
                return
            for worker in self.workers:
                self.beat(worker)
                self.load(worker)
                self.lease(worker)
                for lease_id in list(worker.leases):
                    self.submit(worker, lease_id)
            self.tick(1.0)
        raise AssertionError(f"still asked for after {rounds} rounds: {sorted(self.loop.run.groups)}")

    def _register(self, worker: ModelWorker) -> None:
        if self.loop.fleet.get(worker.worker_id) is None:
            hello = WorkerHello(worker.name, PROTOCOL_VERSION, RUN_ID, 4)
            worker.worker_id = self.run(workers.register(self.loop, hello, self.now, 0.0, b"")).worker_id
            worker.newest = self.loop.run.newest_version


def _all(*effects: e.JournalEvent) -> Decision[None]:
    yield from effects
