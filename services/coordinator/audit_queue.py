"""Audit queue: some groups are checked again, and what is found decides who may continue.

Which groups is drawn with a secret that no worker knows, at a share that depends on the worker's
standing. What waits for the auditor is kept in memory alone: after a restart other groups are
drawn. Findings, strikes and quarantines are journal events and outlive it. Nothing waits for an
audit; a worker in quarantine loses its leases at once, and nothing more is taken from it.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from antiphon.core.loop import events as e
from antiphon.core.loop.admission import sampling_of
from antiphon.core.message_sizes import group_bytes, page
from antiphon.core.records import GroupSubmission, GroupToAudit, SamplingParameters
from antiphon.core.trust.audit import Band, Finding, SampleStatistics, audit_group, calibrate
from antiphon.core.trust.reputation import Standing
from antiphon.core.trust.worker_names import name_of_worker
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.worker_registry import strike
from antiphon.system.wakeup import Wakeup

QUEUE_LIMIT = 256
"""Groups that wait for the auditor; beyond it the oldest are let go."""
AUDIT_S = 120.0
"""An auditor that has not answered by then is taken for lost, and the group is handed out again."""
SAMPLES_KEPT = 2048
"""Trajectories of trusted workers that the band is measured on."""


@dataclass(slots=True)
class _Waiting:
    """A group drawn for an audit."""

    submission: GroupSubmission
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParameters | None = None
    free_at_s: float = 0.0
    """When it may be handed out (again)."""


class AuditQueue:
    """Draws groups, takes findings, shuts workers out."""

    def __init__(self, state_machine: RunStateMachine, secret: bytes) -> None:
        """`secret` has 32 bytes; with it, anyone can work out which groups will be audited."""
        self._state_machine, self._state = state_machine, state_machine.state
        self._secret = secret
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._trusted: deque[SampleStatistics] = deque(maxlen=SAMPLES_KEPT)
        self._asked = Wakeup()

    @property
    def band(self) -> Band:
        """Return what honest workers show, as far as it was measured."""
        return calibrate(self._trusted)

    @property
    def waiting(self) -> int:
        """Return how many groups wait for an auditor or are with one."""
        return len(self._waiting)

    def choose(self, submission: GroupSubmission) -> None:
        """Draw whether a group that was just accepted will be audited."""
        group = self._state.groups.get(submission.group_id)
        standing = self._state.standings.get(name_of_worker(submission.worker_id), Standing())
        drawn = (
            int.from_bytes(blake3(submission.group_id.encode(), key=self._secret).digest(8), "big") / 2**64
        )
        if group is None or drawn >= standing.share:
            return
        prompt = self._state_machine.prompts.prompt(group.split, group.prompt_index)
        self._waiting[submission.group_id] = _Waiting(
            submission, prompt.token_ids, sampling_of(self._state_machine.config, group)
        )
        while len(self._waiting) > QUEUE_LIMIT:
            self._waiting.popitem(last=False)
        self._asked.notify()

    async def pull(self, limit: int, wait_s: float) -> Sequence[GroupToAudit]:
        """Hand out up to `limit` groups, waiting up to `wait_s` seconds for the first."""
        state_machine = self._state_machine
        deadline = state_machine.clock() + wait_s
        while True:
            state_machine.check()
            now = state_machine.clock()
            free = [waiting for waiting in self._waiting.values() if waiting.free_at_s <= now]
            if free or now >= deadline:
                break
            free_again = min((w.free_at_s for w in self._waiting.values()), default=deadline)
            await self._asked.wait(min(deadline, free_again) - now)
        taken = page(free[: max(0, limit)], _bytes)
        for waiting in taken:
            waiting.free_at_s = now + AUDIT_S
        rule = self._state.sampling_rule or "inverse_cdf"
        return [GroupToAudit(w.submission, w.prompt_token_ids, w.sampling, rule) for w in taken]

    async def submit(self, group_id: str, samples: Sequence[SampleStatistics], worker_id: str = "") -> None:
        """Take what an audit found; a group that was not asked for changes nothing.

        With a `worker_id` it is what the learner saw in training: it may count against a worker, but
        finding nothing is no audit passed.
        """
        self._state_machine.check()
        if worker_id:
            name = name_of_worker(worker_id)
            if name in self._state.registrations and not self._state.barred(name):
                await self._blame(name, group_id, audit_group(samples, self.band))
            return
        waiting = self._waiting.pop(group_id, None)
        if waiting is None or not any(sample.tokens for sample in samples):
            return
        name = name_of_worker(waiting.submission.worker_id)
        standing = self._state.standings.get(name, Standing())
        findings = audit_group(samples, self.band, (standing.tokens, standing.missed))
        if not await self._blame(name, group_id, findings):
            if name in self._state_machine.config.trust.trusted:
                self._trusted.extend(samples)
            tokens, missed = sum(s.tokens for s in samples), sum(s.missed for s in samples)
            drift = max(s.drift for s in samples)
            await self._state_machine.record(e.GroupAudited(group_id, name, tokens, missed, drift))

    async def _blame(self, name: str, group_id: str, findings: Sequence[Finding]) -> bool:
        """Count what was found against a worker; True when there was something."""
        if findings:
            worst = max(findings, key=lambda finding: finding.certain)
            await strike(self._state_machine, name, group_id, worst.check, worst.words, worst.certain)
        return bool(findings)


def _bytes(waiting: _Waiting) -> int:
    trajectories = waiting.submission.trajectories
    tokens = sum(trajectory.token_ids.size for trajectory in trajectories)
    return group_bytes(len(trajectories), tokens, len(waiting.prompt_token_ids))
