"""Client groups: what a client asks a run for, how that ends, and the steps that it makes."""

from base64 import b64encode
from collections.abc import Iterator

import numpy as np

from antiphon.core.client_records import SampleRequest
from antiphon.core.coordinator.loop_state import Decision, Forget, KeepHistory, LoopState, prefix_name
from antiphon.core.errors import ContractError
from antiphon.core.loop import events as e
from antiphon.core.loop.client_groups import KEPT_STEPS, MOST_KEPT, check_driven, check_request
from antiphon.core.loop.group_state import CLIENT_GROUP, GroupPhase
from antiphon.core.records import BatchRef, GroupSubmission

UNFETCHED_SHARE = 0.5
"""Of services.stall_timeout_s, after which a worker gives up: for so long idle workers may get no byte of a
version that they were asked to load before its requests are refused."""


def request(loop: LoopState, asked: SampleRequest, now: float) -> Decision[None]:
    """Open a group for a request; nothing changes when it is known.

    Raises:
        ContractError: when it cannot be sampled, or the run takes none.
    """
    check_driven(loop.config)
    group_id = CLIENT_GROUP + asked.request_id
    if group_id in loop.run.groups or group_id in loop.run.sampled:
        return
    if loop.run.finished:
        raise ContractError(f"run {loop.run_id} is finished; create a model for further samples")
    check_request(asked, loop.run, loop.config, loop.rules, loop.stops is not None)
    oldest = max(0, (loop.run.newest_version or 0) - asked.max_staleness)
    yield e.SamplesRequested(
        group_id=group_id,
        number=loop.run.next_number,
        prompt_token_ids=b64encode(np.asarray(asked.prompt_token_ids, "<i4").tobytes()).decode(),
        seeds=asked.seeds,
        sampling=asked.sampling,
        version=asked.version,
        oldest=oldest if asked.version is None else asked.version,
        at_s=now,
    )


def finish(loop: LoopState, submission: GroupSubmission) -> Decision[None]:
    """End the group of a client that was just accepted; later drafts of its prompt may come from it."""
    group = loop.run.groups.get(submission.group_id)  # a host's held-out answers end when they are handed in
    if group is not None and group.request is not None:
        rewards = (0.0,) * group.samples  # a client keeps its rewards to itself
        yield KeepHistory(loop.prompt_of(group).key, group, submission, rewards)
        yield e.SamplesFinished(group.group_id)


def ended(loop: LoopState, request_id: str) -> str:
    """Return the group of a request whose completions are there; "" while they are not.

    Raises:
        ContractError: for an unknown request, and for one that was refused.
    """
    check_driven(loop.config)
    group_id = CLIENT_GROUP + request_id
    if (found := loop.run.sampled.get(group_id)) is not None:
        if found.refusal:
            raise ContractError(found.refusal)
        return group_id
    if group_id not in loop.run.groups:
        raise ContractError(
            f"request {request_id[:140]!r} is not known, or its completions are kept no longer; ask again"
        )
    return ""


def waits_for(loop: LoopState, request_id: str) -> str:
    """Say what a request waits for that `ended` says is not done."""
    group = loop.run.groups[CLIENT_GROUP + request_id]
    if loop.run.paused_reason:
        return f"the run is paused: {loop.run.paused_reason}"
    if group.phase is GroupPhase.LEASED:
        return f"{group.worker_id} to sample it"
    before = sum(other.number < group.number for other in loop.run.open_groups.values())
    version = "of a version from" if group.version is None else "of version"
    named = f"a worker {version} {group.oldest_wanted}, and {before} requests before it"
    return loop.fleet.absence() or named


def overdue(loop: LoopState, now: float) -> Decision[None]:
    """Forget what was kept long enough, and refuse requests whose version no worker can fetch."""
    if old := tuple(_old(loop, now)):
        yield e.SamplesForgotten(old)
        yield Forget(old)
        for group_id in old:
            loop.sampled_at.pop(group_id, None)
    for version in _unfetchable(loop, now):
        reason = (
            f"the weights of version {version} are kept no longer: no worker could fetch them; sample from a "
            "newer version, or from saved weights"
        )
        waiting = [group for group in loop.run.open_groups.values() if group.version == version]
        for group in waiting:
            loop.leases.partial_groups.forget(group.group_id)
            yield Forget((prefix_name(group.group_id),))
            yield e.SamplesFinished(group.group_id, reason)


def _old(loop: LoopState, now: float) -> Iterator[str]:
    """Yield the groups, the oldest first, that are neither of the newest steps and requests nor young."""
    spare = len(loop.run.sampled) - MOST_KEPT
    for place, (group_id, found) in enumerate(loop.run.sampled.items()):
        young = now - loop.sampled_at.get(group_id, loop.begun_s) < loop.config.door.future_ttl_s
        if young or (place >= spare and found.step >= len(loop.run.commits) - KEPT_STEPS):
            return
        yield group_id


def _unfetchable(loop: LoopState, now: float) -> list[int]:
    """Return the versions of open requests that idle workers wait for and of which nothing comes."""
    members = loop.fleet.living()
    held = {member.held_version for member in members}
    wanted = {group.version for group in loop.run.open_groups.values()} - held - {None}
    known, loop.unfetched, found = loop.unfetched, {}, []
    for version in sorted(version for version in wanted if version is not None):
        idle = [m for m in members if m.sent_wanted == version and not loop.leases.of_worker(m.worker_id)]
        fetched = sum(member.bytes_fetched for member in idle)
        since_s, before = known.get(version, (now, fetched))
        if not idle:
            continue
        loop.unfetched[version] = (now if fetched != before else since_s), fetched
        if now - loop.unfetched[version][0] > UNFETCHED_SHARE * loop.config.services.stall_timeout_s:
            found.append(version)
    return found


def check_step(loop: LoopState, step: int, digest: str) -> BatchRef | None:
    """Return the batch of a step that has this file already; None where it can be sealed now.

    Raises:
        ContractError: for another step than the next one, and for another file than it has.
    """
    check_driven(loop.config)
    state = loop.run
    if state.is_sealed(step):
        if state.sealed[step].digest == digest:
            return state.sealed[step]
        raise ContractError(
            f"step {step} has batch {state.sealed[step].digest[:12]}, not {digest[:12]}; a sealed batch "
            "never changes"
        )
    if state.finished or not 0 <= step == len(state.commits) < loop.config.run.steps:
        raise ContractError(
            f"step {step} cannot be sealed: {len(state.commits)} of run.steps={loop.config.run.steps} are "
            f"committed{', and the run is finished' if state.finished else ''}; seal the next one"
        )
    return None


def seal(loop: LoopState, batch: e.BatchSealed) -> Decision[BatchRef]:
    """Make a client's step file the batch of the next step.

    Raises:
        ContractError: as `check_step`.
    """
    known = check_step(loop, batch.step, batch.digest)
    if known is None:
        if batch.step >= loop.run.opened_steps:
            yield e.StepOpened(batch.step)
        yield batch
    return loop.run.sealed[batch.step]
