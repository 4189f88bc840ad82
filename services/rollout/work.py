"""Work in flight: the groups that a worker has leased and the coordinator has not taken back yet.

A group that another worker began continues where that one's progress ends: the engine is given the tokens
that are there and samples the rest, and what is handed in is the two joined. In the same way a sample of a
task with turns goes on behind its environment's answer; while it waits for that it takes no place in the
engine. Of what is unfinished the coordinator gets between two heartbeats only the difference. Where the
engine is in the middle of a long step, or one heartbeat would grow too large, the rest follows with the next.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import structlog

from antiphon.api.engine import EngineOutput, EngineProgress, EngineRequest
from antiphon.core.drafting.statistics import add_statistics
from antiphon.core.records import (
    Completion,
    DraftingStatistics,
    FinishReason,
    GroupSubmission,
    Lease,
    LeaseProgress,
    PartialTrajectory,
    Trajectory,
)
from antiphon.core.requests import TurnReply
from antiphon.core.seeds import branch_seed
from antiphon.core.spans import branches, joined, rest_of, shifted
from antiphon.services.rollout.engine.thread import EngineThread
from antiphon.system.wakeup import Wakeup

MOST_HEARTBEAT_TOKENS = 1 << 18
"""Tokens after which a heartbeat takes no further group: 2 MiB, far below the largest message."""
WAITS_KEPT = 4096
"""Turns of which it is known how long they waited."""
OLD_RATE_SHARE = 0.8
"""Share of the measured rate that stays with each new completion."""

_NOTHING = PartialTrajectory(
    np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32), (), FinishReason.STOP, sample_index=0
)
"""A row before its first token; where a host says what comes first, it stands for a turn that has ended."""

_log = structlog.get_logger(__name__)


class GroupInFlight:
    """The requests of one lease and what came of them so far."""

    def __init__(self, lease: Lease, started_at: float, prefixes: Mapping[int, PartialTrajectory]) -> None:
        """Begin at this second of the event loop's clock; `prefixes` are what an earlier holder sampled."""
        self.lease, self.prefixes = lease, dict(prefixes)
        """What the engine's requests continue: of earlier holders, and of earlier turns."""
        self.begun = dict.fromkeys(range(len(lease.seeds)), started_at)
        """When the engine got each request."""
        self.ended = dict.fromkeys(self.begun, started_at)
        """When its turn ended."""
        self.started_at = started_at
        self.completions: dict[int, Completion] = {}
        """Whole ones, by sample index."""
        self.waiting: dict[int, Completion] = {}
        """Those whose turn has ended, by sample index, until the environment has answered."""
        for index, prefix in prefixes.items():
            if prefix.finish_reason is not None:
                goes_on = lease.limits is not None and prefix.finish_reason.ends_turn
                (self.waiting if goes_on else self.completions)[index] = prefix
        if lease.limits is not None and lease.limits.hosted:  # the host says how each sample begins
            unbegun = [index for index in self.begun if index not in prefixes]
            self.waiting |= {index: replace(_NOTHING, sample_index=index) for index in unbegun}
        self.drafting: list[DraftingStatistics] = []
        """Of completions that ended here, in that order: the last one knows the newest gain."""
        self.cached: list[int] = []
        """Tokens whose cache the engine had, of each request that ended here."""
        # The coordinator keeps what it sent along.
        self.note_kept(self._given(index) for index in range(len(lease.seeds)))

    @property
    def unfinished(self) -> list[int]:
        """The samples that the engine is sampling."""
        samples = range(len(self.lease.seeds))
        return [index for index in samples if index not in self.completions and index not in self.waiting]

    def known(self) -> dict[str, int]:
        """Return, by request id, how many tokens sampled here the coordinator keeps already."""
        return {
            f"{self.lease.lease_id}/{index}": max(0, self.kept[index] - self._given(index))
            for index in self.unfinished
        }

    def note_kept(self, kept: Iterable[int]) -> None:
        """Note how many tokens of each sample the coordinator says it keeps; of the last ones none."""
        self.kept = dict.fromkeys(range(len(self.lease.seeds)), 0) | dict(enumerate(kept))

    def tokens_left(self, progress: Sequence[LeaseProgress]) -> int:
        """Return the most tokens that the slowest completion can still get."""
        reached = dict(self.kept)
        for lease in progress:
            if lease.lease_id == self.lease.lease_id:
                reached |= {piece.sample_index: piece.stop for piece in lease.pieces}
        left = [longest_turn(self.lease, self.prefixes.get(i)) - reached[i] for i in self.unfinished]
        return max(left, default=0)

    def request(self, index: int) -> EngineRequest:
        """Return what the engine is to sample next of a sample."""
        lease, row = self.lease, self.prefixes.get(index, _NOTHING)
        branch = branches(lease.prompt_token_ids, row)[-1]
        return EngineRequest(
            request_id=f"{lease.lease_id}/{index}",
            prompt_token_ids=tuple(branch.context.tolist()),
            seed=branch_seed(lease.seeds[index], branch.number),
            sampling=replace(lease.sampling, max_tokens=longest_turn(lease, row) - branch.start),
            group=lease.lease_id,
            history=lease.history,
            prefix_token_ids=tuple(row.token_ids[branch.start :].tolist()),
            turn_begin=max(0, turn_begin(row) - branch.start),
        )

    def pieces(self, progress: Mapping[str, EngineProgress]) -> list[PartialTrajectory]:
        """Return what the coordinator does not keep yet, in sample order.

        Args:
            progress: by request id, what the engine reports of the samples it is sampling.
        """
        pieces = []
        for index in range(len(self.lease.seeds)):
            whole, prefix = self.completions.get(index), self.prefixes.get(index)
            whole = whole or self.waiting.get(index)
            sampled = progress.get(f"{self.lease.lease_id}/{index}")
            if whole is None:
                whole = sampled or prefix if sampled is None or prefix is None else continued(prefix, sampled)
            rest = None if whole is None else rest_of(whole, self.kept[index])
            if rest is not None and rest.token_ids.size:
                pieces.append(piece_of(rest, index))
        return pieces

    def answered(self, index: int, reply: TurnReply, now: float) -> None:
        """Take the answer to the turn of a sample: what it observes, or why its trajectory is over."""
        row, size = self.waiting.pop(index), len(reply.token_ids)
        if reply.finish_reason is not None:
            self.completions[index] = replace(row, finish_reason=reply.finish_reason)
            return
        observed = PartialTrajectory(
            np.array(reply.token_ids, dtype=np.int32),
            np.zeros(size, dtype=np.float32),
            (),
            sample_index=index,
            observed=((row.stop, row.stop + size),),
            breaks=(row.stop,) if reply.fresh else (),
        )
        self.prefixes[index] = joined([piece_of(row, index), observed])
        self.begun[index] = now

    def submission(self, worker_id: str, finished_at: float) -> GroupSubmission:
        """Return what is handed in, samples in the order of their seeds; same clock as at the beginning."""
        trajectories = []
        for index, seed in enumerate(self.lease.seeds):
            whole = self.completions[index]
            assert whole.finish_reason is not None, "the completion is whole"
            part = whole.token_ids, whole.logprobs, whole.spans, whole.finish_reason
            trajectories.append(
                Trajectory(
                    *part, sample_index=index, seed=seed, observed=whole.observed, breaks=whole.breaks
                ),
            )
        drafting, samples = add_statistics(self.drafting), len(trajectories)
        if drafting is not None and drafting.with_history > samples:  # each turn counted its sample
            drafting = replace(drafting, with_history=samples)
        return GroupSubmission(
            lease_id=self.lease.lease_id,
            group_id=self.lease.group_id,
            worker_id=worker_id,
            trajectories=tuple(trajectories),
            generation_s=finished_at - self.started_at,
            drafting=None if drafting is None else replace(drafting, gain=float(self.drafting[-1].gain)),
            cached_tokens=min([*self.cached, len(self.lease.prompt_token_ids)] if self.cached else [0]),
        )

    def _given(self, index: int) -> int:
        return self.prefixes[index].stop if index in self.prefixes else 0


def piece_of(row: Completion, index: int) -> PartialTrajectory:
    """Return a completion, or a piece of one, as what is reported of a sample."""
    part = row.token_ids, row.logprobs, row.spans, row.finish_reason
    return PartialTrajectory(*part, sample_index=index, observed=row.observed, breaks=row.breaks)


def longest_turn(lease: Lease, row: Completion | None) -> int:
    """Return how many tokens a row may have at the end of the turn that it is in."""
    if lease.limits is None:
        return lease.sampling.max_tokens
    longest = lease.limits.longest(() if row is None else row.breaks)
    return min(turn_begin(row) + lease.sampling.max_tokens, longest)


def turn_begin(row: Completion | None) -> int:
    """Return where in a row the turn that it is in begins."""
    return row.observed[-1][1] if row is not None and row.observed else 0


def continued(prefix: PartialTrajectory, sampled: EngineOutput | EngineProgress) -> Completion:
    """Return what was sampled here behind what the lease came with.

    Where the engine returned only what is new since some token, the piece begins there.
    """
    own = replace(sampled, spans=shifted(sampled.spans, prefix.stop))
    return own if own.start > prefix.stop else joined([prefix, own])


class WorkInFlight:
    """Groups that are sampled, and finished ones until their submission was answered, by lease id."""

    def __init__(self, change: Wakeup) -> None:
        """Start with nothing; `change` is notified when a completion ended, since there is room then."""
        self._change = change
        self.worker_id = ""
        """What the coordinator calls this worker; empty before it is registered."""
        self.groups: dict[str, GroupInFlight] = {}
        self.finished: dict[str, GroupSubmission] = {}
        self.to_hand_in: asyncio.Queue[GroupSubmission] = asyncio.Queue()
        """Those of the finished ones that no call is under way for."""
        self.turns: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        """Lease id and sample index of turns that have ended and that no one has asked about yet."""
        self.turn_waits_s: deque[float] = deque(maxlen=WAITS_KEPT)
        """How long the newest turns waited for their answers, until the engine went on."""
        self.unusable: set[str] = set()
        """Leases to give back: another version was loaded while they were on their way."""
        self.tokens_generated = 0
        self.seconds_per_token: float | None = None
        """Of one completion, as measured here lately; None before the first one."""

    @property
    def idle(self) -> bool:
        """Whether nothing is sampled and nothing waits to be handed in."""
        return not self.groups and not self.finished

    @property
    def samples(self) -> int:
        """Requests that the engine is sampling: a group's ended ones make room for other groups.

        Of those that wait for an answer a half counts, since they come back.
        """
        waiting = sum(len(group.waiting) for group in self.groups.values())
        return sum(len(group.unfinished) for group in self.groups.values()) + waiting // 2

    def by_pin(self) -> tuple[int, int]:
        """Return (groups whose lease names a version, other groups) of those that are sampled."""
        pinned = sum(group.lease.version is not None for group in self.groups.values())
        return pinned, len(self.groups) - pinned

    def take(self, lease: Lease, engine: EngineThread) -> None:
        """Sample a lease from where its last holder came to."""
        group = GroupInFlight(lease, asyncio.get_running_loop().time(), usable_prefix(lease, engine))
        self.groups[lease.lease_id] = group
        for index in group.waiting:
            self.turns.put_nowait((lease.lease_id, index))
        if requests := [group.request(index) for index in group.unfinished]:
            engine.add(requests)
        elif not group.waiting:  # its last holder was lost between its last token and handing in
            self._finish(group)

    def answer(self, lease_id: str, index: int, reply: TurnReply, engine: EngineThread) -> None:
        """Go on with a sample behind the environment's answer, or end it."""
        group, now = self.groups[lease_id], asyncio.get_running_loop().time()
        self.turn_waits_s.append(now - group.ended[index])
        group.kept[index] = reply.kept
        group.answered(index, reply, now)
        if reply.finish_reason is None:
            engine.add([group.request(index)])
        elif len(group.completions) == len(group.lease.seeds):
            self._finish(group)
        self._change.notify()

    def collect(self, outputs: Sequence[EngineOutput]) -> None:
        """Take in completions from the engine; those of groups that are not sampled any more are dropped."""
        loop = asyncio.get_running_loop()
        for output in outputs:
            tokens = len(output.token_ids)
            self.tokens_generated += tokens
            lease_id, _, name = output.request_id.rpartition("/")
            group = self.groups.get(lease_id)
            if group is None:
                continue
            index = int(name)
            if tokens:
                new, old = (loop.time() - group.begun[index]) / tokens, self.seconds_per_token
                mixed = new if old is None else OLD_RATE_SHARE * old + (1 - OLD_RATE_SHARE) * new
                self.seconds_per_token = mixed
            prefix = group.prefixes.get(index)
            row = output if prefix is None else continued(prefix, output)
            group.cached.append(output.cached_tokens)
            if output.drafting is not None:
                group.drafting.append(output.drafting)
            if group.lease.limits is not None:
                group.waiting[index], group.ended[index] = row, loop.time()
                self.turns.put_nowait((lease_id, index))
            else:
                group.completions[index] = row
            if len(group.completions) == len(group.lease.seeds):
                self._finish(group)
            self._change.notify()

    def _finish(self, group: GroupInFlight) -> None:
        lease_id, now = group.lease.lease_id, asyncio.get_running_loop().time()
        del self.groups[lease_id]
        self.finished[lease_id] = group.submission(self.worker_id, now)
        self.to_hand_in.put_nowait(self.finished[lease_id])
        self._change.notify()


async def gather(
    groups: Sequence[GroupInFlight], engine: EngineThread, timeout_s: float, *, stop: bool = False
) -> tuple[LeaseProgress, ...]:
    """Return what was sampled of some groups and is not kept by the coordinator.

    Args:
        groups: groups in flight, the most urgent first.
        engine: samples them.
        timeout_s: longest wait for the engine's step.
        stop: end sampling them in the same moment.
    """
    known = {request_id: count for group in groups for request_id, count in group.known().items()}
    reported = await engine.progress(known, timeout_s, stop) if known else []
    if reported is None:
        return ()
    by_request = {progress.request_id: progress for progress in reported}
    gathered: list[LeaseProgress] = []
    tokens = 0
    for group in groups:
        pieces = group.pieces(by_request)
        size = sum(int(piece.token_ids.size) for piece in pieces)
        if not pieces or (gathered and tokens + size > MOST_HEARTBEAT_TOKENS):
            continue
        gathered.append(LeaseProgress(group.lease.lease_id, tuple(pieces)))
        tokens += size
    return tuple(gathered)


def usable_prefix(lease: Lease, engine: EngineThread) -> dict[int, PartialTrajectory]:
    """Return what a lease came with, by sample; nothing where this engine cannot continue it.

    Another worker wrote it, and no one has verified it: what no engine can have sampled is left
    aside, and the group starts again.
    """
    prefix = {piece.sample_index: piece for piece in lease.prefix}
    possible = all(
        piece.start == 0
        and 0 <= piece.sample_index < len(lease.seeds)
        and piece.token_ids.size > 0
        and int(piece.token_ids.min()) >= 0
        and int(piece.token_ids.max()) < engine.vocabulary_size
        and (piece.finish_reason is not None or piece.stop < longest_turn(lease, piece))
        for piece in lease.prefix
    )
    if prefix and not (possible and engine.continues):
        reason = "the engine does not continue bit for bit" if possible else "no engine can have written it"
        _log.warning("prefix.left", lease=lease.lease_id, group=lease.group_id, reason=reason)
        return {}
    return prefix
