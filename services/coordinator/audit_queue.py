"""Audit queue: some groups are checked again, and what is found decides who may continue.

Which groups is drawn with a secret that no worker knows, at a share that depends on the worker's
standing. What waits for the auditor is kept in memory alone: after a restart other groups are
drawn. Findings, strikes and quarantines are journal events and outlive it. What is found counts for the
worker that sampled the tokens, not the one that handed them in. No batch waits for an audit, but a worker of
which many groups wait gets no leases; one in quarantine loses those it has, nothing more is taken from it,
and what it sampled and no batch has yet does not train.
"""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from blake3 import blake3

from antiphon.core.coordinator.consequences import strike
from antiphon.core.coordinator.loop_state import LONGEST_REASON, Decision
from antiphon.core.loop import events as e
from antiphon.core.loop.admission import sampling_of
from antiphon.core.message_sizes import group_bytes, page
from antiphon.core.records import GroupSubmission, GroupToAudit, SamplingParameters
from antiphon.core.trust.audit import (
    AuthoredSpan,
    Band,
    SampleStatistics,
    Sums,
    audit_group,
    by_author,
    calibrate,
)
from antiphon.core.trust.reputation import Standing
from antiphon.core.trust.worker_names import name_of_worker
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.system.wakeup import Wakeup

UNAUDITED_LIMIT = 16
"""Groups of one worker that may wait for the auditor; a worker with more gets no leases meanwhile."""
QUEUE_LIMIT = 256
"""Groups that may wait in all; beyond it no worker of which one waits gets a lease."""
QUEUE_CAPACITY = 512
"""Groups held at most: leases that run already may fill it. Beyond it the oldest are counted as unaudited."""
AUDIT_S = 120.0
"""An auditor that has not answered by then is taken for lost, and the group is handed out again."""
ATTEMPTS = 3
"""How often a group is handed out before it is counted as unaudited."""
AUDITOR_GONE_S = 600.0
"""Once no auditor has asked for so long, what waits slows nobody any more."""
SAMPLES_KEPT = 2048
"""Trajectories of trusted workers that the band is measured on."""

_log = structlog.get_logger("coordinator")


@dataclass(slots=True)
class _Waiting:
    """A group drawn for an audit."""

    submission: GroupSubmission
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParameters | None = None
    authors: tuple[AuthoredSpan, ...] = ()
    free_at_s: float = -math.inf
    """When it may be handed out (again)."""
    attempts: int = 0
    """How often it was handed out."""

    @property
    def name(self) -> str:
        """Return the name of the worker that handed it in."""
        return name_of_worker(self.submission.worker_id)


class AuditQueue:
    """Draws groups, takes findings, shuts workers out."""

    def __init__(self, state_machine: RunStateMachine, secret: bytes) -> None:
        """`secret` has 32 bytes; with it, anyone can work out which groups will be audited."""
        self._state_machine, self._state = state_machine, state_machine.state
        self._secret = secret
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._waiting_of: Counter[str] = Counter()
        """Worker name -> groups of it that wait."""
        self._trusted: deque[SampleStatistics] = deque(maxlen=SAMPLES_KEPT)
        self._asked = Wakeup()
        self._asked_at_s = state_machine.clock()

    @property
    def band(self) -> Band:
        """Return what honest workers show, as far as it was measured."""
        return calibrate(self._trusted)

    @property
    def waiting(self) -> int:
        """Return how many groups wait for an auditor or are with one."""
        return len(self._waiting)

    def holds_back(self, worker_name: str) -> str:
        """Return why a worker gets no lease until groups of it were audited; "" when it may have one."""
        own = self._waiting_of[worker_name]
        if own < UNAUDITED_LIMIT and not (own and len(self._waiting) >= QUEUE_LIMIT):
            return ""
        if self._state_machine.clock() - self._asked_at_s >= AUDITOR_GONE_S:
            return ""
        return f"{own} groups of {worker_name} wait for the auditor; there are leases once they were audited"

    def choose(self, submission: GroupSubmission) -> Decision[None]:
        """Draw whether a group that was just accepted will be audited.

        The share is that of the least trusted of the workers that sampled some of it.
        """
        group = self._state.groups.get(submission.group_id)
        receipt = self._state.receipts.get(submission.group_id)
        authors = () if receipt is None else tuple(AuthoredSpan(*author) for author in receipt.authors)
        names = {name_of_worker(w) for w in (submission.worker_id, *(a.worker_id for a in authors))}
        share = max(self._state.standings.get(name, Standing()).share for name in names)
        drawn = (
            int.from_bytes(blake3(submission.group_id.encode(), key=self._secret).digest(8), "big") / 2**64
        )
        if group is None or drawn >= share:
            return
        prompt = self._state_machine.loop.prompt_of(group)
        sampling = sampling_of(self._state_machine.config, group)
        waiting = _Waiting(submission, prompt.token_ids, sampling, authors)
        if submission.group_id in self._waiting:
            # An answer that is under way is not about this submission: it must blame nobody for it.
            yield from self._skip(submission.group_id, "it was sampled again before an audit of it ended")
            return
        self._waiting[submission.group_id] = waiting
        self._waiting_of[waiting.name] += 1
        if len(self._waiting) > QUEUE_CAPACITY:
            yield from self._skip(next(iter(self._waiting)), f"{QUEUE_CAPACITY} groups waited already")
        self._asked.notify()

    async def pull(self, limit: int, wait_s: float) -> Sequence[GroupToAudit]:
        """Hand out up to `limit` groups, waiting up to `wait_s` seconds for the first."""
        state_machine = self._state_machine
        deadline = state_machine.clock() + wait_s
        while True:
            state_machine.check()
            self._asked_at_s = now = state_machine.clock()
            self._skip_hopeless(now)
            free = [waiting for waiting in self._waiting.values() if waiting.free_at_s <= now]
            if free or now >= deadline:
                break
            free_again = min((w.free_at_s for w in self._waiting.values()), default=deadline)
            await self._asked.wait(min(deadline, free_again) - now)
        taken = page(free[: max(0, limit)], _bytes)
        for waiting in taken:
            waiting.free_at_s = now + AUDIT_S
            waiting.attempts += 1
        rule = self._state.sampling_rule or "inverse_cdf"
        return [GroupToAudit(w.submission, w.prompt_token_ids, w.sampling, rule, w.authors) for w in taken]

    async def submit(
        self, group_id: str, samples: Sequence[SampleStatistics], worker_id: str = "", reason: str = ""
    ) -> None:
        """Take what an audit found; a group that was not asked for changes nothing.

        With a `worker_id` it is what the learner saw in training: it may count against the worker that
        sampled a completion alone, but finding nothing is no audit passed. `reason` says why no token could
        be scored: such a group is counted as unaudited and makes no one more trusted.
        """
        self._state_machine.check()
        if worker_id:
            receipt = self._state.receipts.get(group_id)
            shared = set() if receipt is None else {author[0] for author in receipt.authors}
            own = [sample for sample in samples if sample.sample_index not in shared]
            self._blame(name_of_worker(worker_id), group_id, own, self.band)
            await self._state_machine.written()
            return
        waiting = self._waiting.get(group_id)
        if waiting is None:
            return
        if not any(sample.tokens for sample in samples):
            self._state_machine.run(self._skip(group_id, reason or "no token could be scored"))
            await self._state_machine.written()
            return
        self._take(group_id)
        band = self.band
        total = sum(trajectory.sampled_tokens for trajectory in waiting.submission.trajectories)
        for author, own in by_author(samples, waiting.submission.worker_id).items():
            name, sums = name_of_worker(author), Sums.of(own)
            if not sums.tokens or self._state.barred(name) or self._blame(name, group_id, own, band):
                continue
            if name in self._state_machine.config.trust.trusted:
                self._trusted.extend(own)
            drift, most = max(s.drift for s in own), 2 * sums.tokens > total
            kept = sum(s.kept_cache for s in own)
            event = e.GroupAudited(
                group_id, name, sums.tokens, sums.missed, drift, sums.near, most, kept_cache=kept
            )
            self._state_machine.run(_recorded(event))
        await self._state_machine.written()

    def _take(self, group_id: str) -> _Waiting | None:
        """Let go of a group, and let its worker have leases again if this held it back."""
        waiting = self._waiting.pop(group_id, None)
        if waiting is not None:
            self._waiting_of[waiting.name] -= 1
            if not self._waiting_of[waiting.name]:
                del self._waiting_of[waiting.name]
            self._state_machine.work.tell(waiting.submission.worker_id)
        return waiting

    def _skip(self, group_id: str, reason: str) -> Decision[None]:
        """Count a group as not audited."""
        waiting, reason = self._take(group_id), reason[:LONGEST_REASON]
        if waiting is None:
            return
        _log.warning("audit.skipped", worker=waiting.name, group=group_id, reason=reason)
        yield e.GroupAudited(group_id, waiting.name, 0, 0, 0.0, most=False, unaudited=reason)

    def _skip_hopeless(self, now: float) -> None:
        """Let go of groups that auditors got often enough without an answer."""
        for group_id, waiting in list(self._waiting.items()):
            if waiting.attempts >= ATTEMPTS and waiting.free_at_s <= now:
                reason = f"{ATTEMPTS} times the auditor did not answer within {AUDIT_S:g} s"
                self._state_machine.run(self._skip(group_id, reason))

    def _blame(self, name: str, group_id: str, samples: Sequence[SampleStatistics], band: Band) -> bool:
        """Count what was found against the worker that sampled; True when there was something."""
        standing = self._state.standings.get(name, Standing())
        if name not in self._state.registrations or self._state.barred(name):
            return False
        findings = audit_group(samples, band, standing.sums)
        if findings:
            worst = max(findings, key=lambda finding: finding.certain)
            gross, machine = Sums.of(samples).gross, self._state_machine
            about = group_id, worst.check, worst.words
            machine.run(strike(machine.loop, name, *about, machine.clock(), worst.certain, gross))
        return bool(findings)


def _recorded(event: e.JournalEvent) -> Decision[None]:
    yield event


def _bytes(waiting: _Waiting) -> int:
    trajectories = waiting.submission.trajectories
    tokens = sum(trajectory.token_ids.size for trajectory in trajectories)
    return group_bytes(len(trajectories), tokens, len(waiting.prompt_token_ids))
