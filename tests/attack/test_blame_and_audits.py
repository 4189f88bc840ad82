"""Workers that shift blame onto others or dodge audits, against a real coordinator and auditor."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from antiphon.benchmarks.parts.trust import dishonest_workers as workers
from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.records import (
    GroupRewards,
    GroupToAudit,
    Lease,
    LeaseProgress,
    PartialTrajectory,
    SampleReward,
    SubmitVerdict,
    Trajectory,
    VersionSpan,
)
from antiphon.core.requests import LeaseRequest, WorkerHeartbeat
from antiphon.core.trust.audit import SampleStatistics
from antiphon.net.security.keys import LEARNER_KEY, load_key
from antiphon.services.coordinator import audit_queue
from antiphon.services.learner.audits.audit_loop import audit_forever
from antiphon.weights.signature import sign_manifest
from tests.support.audited import CONFIG, PLAIN, Guest, ScoringAuditor, enter, run, submission, until_audited
from tests.support.light_parties import decided
from tests.support.loop_model import light_manifest
from tests.support.secured import House, SecuredSite, make_house

GIVEN = 6
"""Tokens of each completion that a worker reports before it releases its lease."""


@pytest.fixture(scope="module")
def sampler() -> workers.TinySampler:
    torch.set_num_threads(1)
    return workers.load_sampler()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return make_house(tmp_path_factory.mktemp("home") / "keys", ["good", "bad"])


def audit_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.core.trust.reputation.FIRST_SHARE", 1.0)
    monkeypatch.setattr("antiphon.core.trust.reputation.LAST_SHARE", 1.0)


async def begin(guest: Guest, make: workers.Make) -> tuple[Lease, workers.Group]:
    """Lease a group, report its first tokens and release it."""
    reply = await guest.client.lease_group(LeaseRequest(guest.worker_id, 0, 1, 5.0))
    (lease,) = reply.leases
    (made,) = await asyncio.to_thread(make, [lease])
    progress = LeaseProgress(lease.lease_id, tuple(map(beginning, made)))
    beat = WorkerHeartbeat(guest.worker_id, 0, None, (lease.lease_id,), 0, 0.0, 1.0, (progress,))
    await guest.client.heartbeat(dataclasses.replace(beat, released_leases=(lease.lease_id,)))
    return lease, made


def beginning(whole: Trajectory) -> PartialTrajectory:
    count = min(GIVEN, whole.token_ids.size)
    return PartialTrajectory(
        whole.token_ids[:count],
        whole.logprobs[:count],
        (VersionSpan(0, 0, count),),
        whole.finish_reason if count == whole.token_ids.size else None,
        sample_index=whole.sample_index,
    )


async def finish(guest: Guest, sampler: workers.TinySampler, begun: workers.Group, lie: bool = False) -> str:
    """Lease the group that another began, go on from there and hand it in; return its id."""
    reply = await guest.client.lease_group(LeaseRequest(guest.worker_id, 0, 1, 5.0))
    (lease,) = reply.leases
    assert [piece.stop for piece in lease.prefix] == [min(GIVEN, one.token_ids.size) for one in begun]
    make = workers.continued(sampler, [begun], GIVEN)
    (made,) = await asyncio.to_thread(make, [lease])
    if lie:
        made = tuple(
            dataclasses.replace(one, logprobs=np.r_[one.logprobs[:GIVEN], one.logprobs[GIVEN:] * 0.5])
            for one in made
        )
    verdict = await guest.client.submit_group(submission(lease, guest.worker_id, made))
    assert verdict is SubmitVerdict.ACCEPTED
    return lease.group_id


@pytest.mark.parametrize("liar", ["first", "last"])
def test_blame_follows_who_sampled(
    tmp_path: Path,
    house: House,
    sampler: workers.TinySampler,
    monkeypatch: pytest.MonkeyPatch,
    liar: str,
) -> None:
    """A liar has an honest worker hand in what it began, or spoils the rest of what an honest one began."""
    audit_everything(monkeypatch)

    async def act(site: SecuredSite) -> None:
        bad, good = await enter(site, house, "bad"), await enter(site, house, "good")
        auditor = ScoringAuditor(CONFIG, None, sampler.model)  # type: ignore[arg-type]
        auditing = asyncio.ensure_future(
            audit_forever(site.client(house.services), auditor.examine, "auditor")
        )
        first, last = (bad, good) if liar == "first" else (good, bad)
        make = workers.cherry_picked(sampler, 1) if liar == "first" else workers.honest(sampler)
        _, begun = await begin(first, make)
        group_id = await finish(last, sampler, begun, lie=liar == "last")
        authors = {author[1] for author in site.state_machine.state.receipts[group_id].authors}
        assert authors == {first.worker_id}
        await until_audited(site)
        state = site.state_machine.state
        assert state.standings["bad"].strikes and not state.standings["good"].strikes
        assert state.barred("bad") and not state.barred("good")
        # A group of which the liar sampled some does not train, no matter which worker handed it in.
        assert await site.client(house.services).submit_rewards([GroupRewards(group_id, tuple(rewards()))])
        assert group_id not in state.groups
        auditing.cancel()

    run(tmp_path, house, act)


def test_what_the_learner_sees_speaks_against_no_one_for_a_completion_of_two(
    tmp_path: Path, house: House, sampler: workers.TinySampler
) -> None:
    async def act(site: SecuredSite) -> None:
        bad, good = await enter(site, house, "bad"), await enter(site, house, "good")
        _, begun = await begin(bad, workers.honest(sampler))
        group_id = await finish(good, sampler, begun)
        far = [SampleStatistics(index, 40, 0, 0, 3.0) for index in range(len(begun))]
        await site.client(house.services).submit_audit(group_id, far, good.worker_id)
        assert not site.state_machine.state.standings.get("good")

    run(tmp_path, house, act)


def test_one_edited_token_a_group_is_found(
    tmp_path: Path, house: House, sampler: workers.TinySampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit_everything(monkeypatch)

    async def act(site: SecuredSite) -> None:
        bad = await enter(site, house, "bad")
        auditor = ScoringAuditor(CONFIG, None, sampler.model)  # type: ignore[arg-type]
        auditing = asyncio.ensure_future(
            audit_forever(site.client(house.services), auditor.examine, "auditor")
        )
        groups = 0
        while not site.state_machine.state.barred("bad"):
            groups += await bad.work(workers.one_edited(sampler, groups))
            assert groups <= 20
            await until_audited(site)
        assert "further off than any rounding" in site.state_machine.state.barred("bad")
        auditing.cancel()

    run(tmp_path, house, act)


def test_versions_that_no_one_can_audit_are_refused(
    tmp_path: Path, house: House, sampler: workers.TinySampler
) -> None:
    """Version 1 exists, but was never published; and a completion goes from newer weights to older ones."""

    async def act(site: SecuredSite) -> None:
        bad = await enter(site, house, "bad")
        state, flow = site.state_machine.state, site.client(house.services)
        for step in range(2):
            sealed = e.BatchSealed(step, (), (), "ab" * 32, "ab" * 32, 0, 0, 0, 0, 0.0, 0.0, ())
            done = e.StepCommitted(step, step + 1, "cd" * 32, sealed.digest, {}, published=step == 1)
            await site.state_machine.do(decided(sealed, done))
        key = load_key(house.keys / "services", LEARNER_KEY)
        await flow.announce_snapshot(sign_manifest(light_manifest(2), key))
        assert set(state.snapshots) == {0, 2} and len(state.commits) == 2
        reply = await bad.client.lease_group(LeaseRequest(bad.worker_id, 0, 1, 5.0))
        (lease,) = reply.leases
        first, *rest = workers.honest(sampler)([lease])[0]
        length = first.token_ids.size
        piece = beginning(first)
        piece = dataclasses.replace(piece, spans=(VersionSpan(1, 0, piece.stop),))
        beat = WorkerHeartbeat(bad.worker_id, 0, None, (lease.lease_id,), 0, 0.0, 1.0)
        told = dataclasses.replace(beat, progress=(LeaseProgress(lease.lease_id, (piece,)),))
        assert (await bad.client.heartbeat(told)).cancelled_leases == (lease.lease_id,)
        assert state.groups[lease.group_id].phase is GroupPhase.OPEN
        for spans, words in (
            ((VersionSpan(1, 0, length),), "version 1, which was never published"),
            ((VersionSpan(2, 0, 1), VersionSpan(0, 1, length)), "version 0 after version 2"),
        ):
            lied = (dataclasses.replace(first, spans=spans), *rest)
            with pytest.raises(ContractError, match=words):
                await bad.client.submit_group(submission(lease, bad.worker_id, lied))
        assert state.groups[lease.group_id].phase is GroupPhase.OPEN
        assert state.standings["bad"].strikes == 3

    run(tmp_path, house, act)


class Breaking(ScoringAuditor):
    """Breaks on its first group in a way that no one foresaw, and finds nothing of the second one kept."""

    broken = 0

    def examine(self, group: GroupToAudit) -> list[SampleStatistics]:
        self.broken += 1
        if self.broken == 1:
            raise RuntimeError("a tensor of another shape")
        if self.broken == 2:
            raise UnavailableError("version 0 is not kept any more (broadcast.snapshots_kept)")
        return super().examine(group)


def test_audits_go_on_after_any_failure_and_are_counted(
    tmp_path: Path, house: House, sampler: workers.TinySampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit_everything(monkeypatch)

    async def act(site: SecuredSite) -> None:
        good, flow = await enter(site, house, "good"), site.client(house.services)
        auditor = Breaking(CONFIG, None, sampler.model)  # type: ignore[arg-type]
        auditing = asyncio.ensure_future(audit_forever(flow, auditor.examine, "auditor"))
        for _ in range(3):
            assert await good.work(workers.honest(sampler))
            await until_audited(site)
        standing = site.state_machine.state.standings["good"]
        assert (standing.audited, standing.unaudited, standing.strikes) == (1, 2, 0)
        status = await flow.status()
        assert status.unaudited == 2 and "not kept any more" in status.unaudited_reason
        auditing.cancel()

    run(tmp_path, house, act)


def test_a_slow_auditor_slows_the_worker_and_drops_nothing(
    tmp_path: Path, house: House, sampler: workers.TinySampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit_everything(monkeypatch)
    monkeypatch.setattr(audit_queue, "UNAUDITED_LIMIT", 2)

    async def act(site: SecuredSite) -> None:
        bad, good = await enter(site, house, "bad"), await enter(site, house, "good")
        for _ in range(2):
            assert await bad.work(workers.honest(sampler))
        reply = await bad.client.lease_group(LeaseRequest(bad.worker_id, 0, 1, 0.0))
        assert not reply.leases and "2 groups of bad wait for the auditor" in reply.reason
        assert await good.work(workers.honest(sampler))  # it has nothing to do with that
        assert site.trust.waiting == 3
        asked = asyncio.ensure_future(bad.client.lease_group(LeaseRequest(bad.worker_id, 0, 1, 20.0)))
        auditor = ScoringAuditor(CONFIG, None, sampler.model)  # type: ignore[arg-type]
        auditing = asyncio.ensure_future(
            audit_forever(site.client(house.services), auditor.examine, "auditor")
        )
        assert (await asked).leases  # as soon as one of them was audited
        await until_audited(site)
        assert site.state_machine.state.standings["bad"].audited == 2
        auditing.cancel()

    run(tmp_path, house, act)


def test_an_answer_about_what_was_dropped_blames_no_one_for_what_came_instead(
    tmp_path: Path, house: House, sampler: workers.TinySampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit_everything(monkeypatch)

    async def act(site: SecuredSite) -> None:
        good, flow = await enter(site, house, "good"), site.client(house.services)
        assert await good.work(workers.honest(sampler))
        (group,) = await flow.pull_for_audit("auditor", 4, 5.0)
        group_id, size = group.submission.group_id, group.submission.trajectories[0].token_ids.size
        submission = await site.state_machine.submissions.get(group_id)
        site.state_machine.run(site.trust.choose(submission))  # as if it was sampled again
        liars = [SampleStatistics(0, size, size, 0, 3.0, size, size)]
        await flow.submit_audit(group_id, liars)
        standing = site.state_machine.state.standings["good"]
        assert (standing.unaudited, standing.strikes, site.trust.waiting) == (1, 0, 0)

    run(tmp_path, house, act)


@pytest.mark.parametrize("mode", ["elastic", "fixed"])
def test_what_a_proven_liar_sampled_does_not_train(
    tmp_path: Path, house: House, sampler: workers.TinySampler, mode: str
) -> None:
    async def act(site: SecuredSite) -> None:
        bad, flow, state = (
            await enter(site, house, "bad"),
            site.client(house.services),
            site.state_machine.state,
        )
        for _ in range(2):
            assert await bad.work(workers.honest(sampler))
        first, second = (group.group_id for group in state.groups.values() if group.phase == "submitted")
        assert await flow.submit_rewards([GroupRewards(first, tuple(rewards()))])
        far = [SampleStatistics(0, 200, 0, 0, 3.0)]
        await flow.submit_audit(first, far, bad.worker_id)  # proof
        assert state.barred("bad")
        await flow.submit_rewards([GroupRewards(second, tuple(rewards()))])  # was at a judge meanwhile
        account = state.work_accounts.account(site.state_machine.clock())
        assert account.tokens["untrusted"] > 0 and account.tokens["useful"] == account.tokens["open"] == 0
        good = await enter(site, house, "good")
        reply = await good.client.lease_group(LeaseRequest(good.worker_id, 0, 16, 5.0))
        ids = {lease.group_id for lease in reply.leases}
        if mode == "fixed":
            assert {first, second} <= ids
        else:
            assert not ids & {first, second} and first not in state.groups and second not in state.groups
        for lease in (
            reply.leases[:1] if mode == "elastic" else [x for x in reply.leases if x.group_id == first]
        ):
            (made,) = await asyncio.to_thread(workers.honest(sampler), [lease])
            verdict = await good.client.submit_group(submission(lease, good.worker_id, made))
            assert verdict is SubmitVerdict.ACCEPTED
            assert await flow.submit_rewards([GroupRewards(lease.group_id, tuple(rewards()))])
            assert state.groups[lease.group_id].phase is GroupPhase.REWARDED
        kinds = [event.kind async for event in flow.watch_events(0, follow=False)]
        assert kinds.count("group.dropped") == 2

    run(tmp_path, house, act, config_of(mode))
    run(tmp_path, house, again, config_of(mode))


async def again(site: SecuredSite) -> None:
    """The journal of all this can be read."""
    assert site.state_machine.state.barred("bad")


def rewards() -> Sequence[SampleReward]:
    return [SampleReward(index, index % 2) for index in range(CONFIG.loop.group_size)]


def config_of(mode: str) -> RunConfig:
    staleness = CONFIG.loop.max_staleness if mode == "elastic" else 0
    return build_config({**PLAIN, "loop": {**PLAIN["loop"], "mode": mode, "max_staleness": staleness}})
