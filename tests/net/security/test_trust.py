"""Dishonest workers meet the production checks, with a real model and sampler (F11).

Twelve kinds: those that lie about what they sampled are found by audits, those that hand in what
cannot be are refused at the gate, those that waste time are bounded by leases and deadlines.
"""

import asyncio
import dataclasses
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from antiphon.benchmarks.parts.trust import dishonest_workers as workers
from antiphon.core.errors import ContractError
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.records import GroupSubmission, GroupToAudit, Lease, SubmitVerdict, Trajectory, VersionSpan
from antiphon.core.requests import LeaseRequest, WorkerHeartbeat
from antiphon.core.trust.audit import Band, SampleStatistics, audit_group
from antiphon.core.trust.reputation import FIRST_SHARE
from antiphon.sampling.rules import RULES
from antiphon.services.learner.audits.audit_loop import audit_forever
from tests.support.audited import CONFIG, SAMPLES, ScoringAuditor, enter, run, submission, until_audited
from tests.support.light_parties import hello
from tests.support.secured import House, SecuredSite, make_house


@pytest.fixture(scope="module", params=RULES)
def either_sampler(request: pytest.FixtureRequest) -> workers.TinySampler:
    torch.set_num_threads(1)
    return workers.load_sampler(rule=request.param)


@pytest.fixture(scope="module")
def sampler() -> workers.TinySampler:
    torch.set_num_threads(1)
    return workers.load_sampler()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return make_house(tmp_path_factory.mktemp("home") / "keys", ["good", "bad"])


LIARS: dict[str, tuple[Callable[[workers.TinySampler], workers.Make], set[str]]] = {
    "wrong tokens": (lambda z: workers.wrong_tokens(z, 0.1, 3), {"sampling", "logprobs"}),
    "wrong model": (
        lambda z: workers.honest(z, workers.disturbed(z.model, 0.3, 3)),
        {"sampling", "logprobs"},
    ),
    "wrong temperature": (lambda z: workers.wrong_temperature(z, 0.6), {"sampling", "logprobs"}),
    "int4 weights": (lambda z: workers.honest(z, workers.quantised(z.model, 4)), {"sampling", "logprobs"}),
    "copied results": (workers.copied, {"sampling"}),
    "cherry-picked": (lambda z: workers.cherry_picked(z, 2), {"sampling"}),
    "fake logprobs": (workers.fake_logprobs, {"logprobs"}),
}


def audit(sampler: workers.TinySampler, lease: Lease, made: tuple[Trajectory, ...]) -> set[str]:
    auditor = ScoringAuditor(CONFIG, None, sampler.model)  # type: ignore[arg-type]
    group = to_audit(sampler, lease, made)
    return {finding.check for finding in audit_group(auditor.examine(group), Band())}


def to_audit(sampler: workers.TinySampler, lease: Lease, made: tuple[Trajectory, ...]) -> GroupToAudit:
    return GroupToAudit(submission(lease, "w-1", made), lease.prompt_token_ids, lease.sampling, sampler.rule)


@pytest.mark.parametrize("kind", LIARS)
def test_liars_are_found_by_one_audit(either_sampler: workers.TinySampler, kind: str) -> None:
    make, checks = LIARS[kind]
    (lease,) = workers.trust_leases(1, samples=6)
    assert audit(either_sampler, lease, make(either_sampler)([lease])[0]) & checks


def test_a_worker_that_draws_by_another_rule_is_found(either_sampler: workers.TinySampler) -> None:
    (other,) = set(RULES) - {either_sampler.rule}
    (lease,) = workers.trust_leases(1, samples=6)
    made = workers.honest(dataclasses.replace(either_sampler, rule=other))([lease])[0]
    assert "sampling" in audit(either_sampler, lease, made)


def test_honest_workers_pass_whatever_the_sampling_parameters(either_sampler: workers.TinySampler) -> None:
    sampler = either_sampler
    for changes in ({}, {"temperature": 0.7}, {"top_k": 4}, {"top_p": 0.8}, {"temperature": 0.0}):
        (lease,) = workers.trust_leases(1, samples=SAMPLES)
        lease = dataclasses.replace(lease, sampling=dataclasses.replace(lease.sampling, **changes))
        auditor = ScoringAuditor(CONFIG, None, sampler.model)  # type: ignore[arg-type]
        made = workers.honest(sampler)([lease])[0]
        found = auditor.examine(to_audit(sampler, lease, made))
        assert sum(s.tokens for s in found) == sum(t.token_ids.size for t in made)
        assert not sum(s.missed + s.impossible for s in found) and max(s.drift for s in found) < 1e-4


def test_the_gate_refuses_what_cannot_be(tmp_path: Path, house: House, sampler: workers.TinySampler) -> None:
    """NaN, oversize, stolen leases, fake versions; and a replayed lease meets its old answer."""

    async def act(site: SecuredSite) -> None:
        bad, good = await enter(site, house, "bad"), await enter(site, house, "good")
        reply = await bad.client.lease_group(LeaseRequest(bad.worker_id, 0, 4, 5.0))
        first, second, third, _ = reply.leases
        made = workers.honest(sampler)([first])[0]
        whole = submission(first, bad.worker_id, made)

        def changed(**fields: object) -> GroupSubmission:
            return dataclasses.replace(
                whole, trajectories=(dataclasses.replace(made[0], **fields), *made[1:])
            )  # type: ignore[arg-type]

        logprobs = made[0].logprobs.copy()
        logprobs[0] = np.nan
        long = np.full(workers.MAX_TOKENS + 1, 5, dtype=np.int32)
        stolen = dataclasses.replace(whole, worker_id=good.worker_id)
        with pytest.raises(ContractError, match="was not granted to 'good-1'"):
            await good.client.submit_group(stolen)
        with pytest.raises(ContractError, match=r"must lie in \[-50, 0\]"):
            await bad.client.submit_group(changed(logprobs=logprobs))
        with pytest.raises(ContractError, match=r"version 9, but its lease allows versions 0\.\.0"):
            await bad.client.submit_group(changed(spans=(VersionSpan(9, 0, made[0].token_ids.size),)))
        assert site.state_machine.state.groups[first.group_id].phase is GroupPhase.OPEN
        assert site.state_machine.state.standings["bad"].strikes == 2
        assert await bad.client.submit_group(whole) is SubmitVerdict.ACCEPTED
        assert await bad.client.submit_group(whole) is SubmitVerdict.ALREADY_ACCEPTED
        replayed = dataclasses.replace(whole, group_id=second.group_id)  # an old payload for another group
        with pytest.raises(ContractError, match="was never granted for group"):
            await bad.client.submit_group(replayed)
        relabelled = dataclasses.replace(replayed, lease_id=second.lease_id)
        with pytest.raises(ContractError, match="seed="):
            await bad.client.submit_group(relabelled)
        # The third strike: out, and what it still holds is offered to others.
        assert "3 strikes" in site.state_machine.state.barred("bad")
        assert (
            await bad.client.submit_group(
                submission(third, bad.worker_id, workers.honest(sampler)([third])[0])
            )
            is SubmitVerdict.LATE
        )
        with pytest.raises(ContractError, match="was excluded from this run: 3 strikes"):
            await bad.client.register(hello("bad"))
        reply = await good.client.lease_group(LeaseRequest(good.worker_id, 0, 8, 5.0))
        assert {second.group_id, third.group_id} <= {lease.group_id for lease in reply.leases}
        too_long = dataclasses.replace(made[0], token_ids=long)
        lease = reply.leases[0]
        with pytest.raises(ContractError):
            await good.client.submit_group(submission(lease, good.worker_id, (too_long, *made[1:])))
        with pytest.raises(ContractError, match=r"(?i)larger than max|exceeds|message"):
            huge = dataclasses.replace(made[0], logprobs=np.zeros(3 << 20, dtype=np.float32))
            await good.client.submit_group(submission(lease, good.worker_id, (huge, *made[1:])))
        with pytest.raises(ContractError, match="was announced for it"):
            await good.client.heartbeat(WorkerHeartbeat(good.worker_id, 0, "ab" * 32, (), 0, 0.0, 0.0))
        with pytest.raises(ContractError, match="speaks protocol version 99"):
            await good.client.register(hello("good", protocol=99))

    run(tmp_path, house, act)


def test_a_liar_is_shut_out_while_others_go_on(
    tmp_path: Path, house: House, sampler: workers.TinySampler
) -> None:
    async def act(site: SecuredSite) -> None:
        flow = site.client(house.services)
        auditor = ScoringAuditor(CONFIG, None, sampler.model)  # type: ignore[arg-type]
        auditing = asyncio.ensure_future(audit_forever(flow, auditor.examine, "auditor"))
        bad, good = await enter(site, house, "bad"), await enter(site, house, "good")
        cheat = workers.cherry_picked(sampler, 1)
        handed_in = 0
        while not site.state_machine.state.barred("bad"):
            handed_in += await bad.work(cheat)
            assert handed_in < 40
            # Audits take as long as they take: wait for the audit queue to hear of what it drew.
            await until_audited(site)
        assert "not where their seeds put them" in site.state_machine.state.barred("bad")
        for _ in range(6):
            assert await good.work(workers.honest(sampler))
        await until_audited(site)
        standing = site.state_machine.state.standings.get("good")
        assert standing is not None and standing.audited and not standing.strikes
        assert standing.share < FIRST_SHARE and not site.state_machine.state.barred("good")
        status = await flow.status()
        assert set(status.barred) == {"bad"}
        kinds = [event.kind async for event in flow.watch_events(0, follow=False)]
        assert {"group.audited", "worker.struck", "worker.quarantined"} <= set(kinds)
        auditing.cancel()

    run(tmp_path, house, act)

    async def after(site: SecuredSite) -> None:  # the journal remembers, and a pardon ends it
        with pytest.raises(ContractError, match="was excluded from this run"):
            await site.client(house.worker("bad")).register(hello("bad"))
        await site.client(house.services).pardon("bad", "its owner mended it")
        await site.client(house.worker("bad")).register(hello("bad"))

    run(tmp_path, house, after)


def test_what_the_learner_sees_in_training_speaks_against_a_worker(tmp_path: Path, house: House) -> None:
    async def act(site: SecuredSite) -> None:
        flow = site.client(house.services)
        await enter(site, house, "bad")
        near, far = SampleStatistics(0, 200, 0, 0, 2e-3), SampleStatistics(0, 200, 0, 0, 0.05)
        await flow.submit_audit("g0000000", [near], "bad-1")
        await flow.submit_audit("g0000001", [far], "nobody-1")
        assert not site.state_machine.state.standings  # within the band, or nobody we know
        for number in range(3):
            assert not site.state_machine.state.barred("bad")
            await flow.submit_audit(f"g000000{number}", [far], "bad-1")
        assert "logprobs differ by 0.05 nats" in site.state_machine.state.barred("bad")

    run(tmp_path, house, act)


def test_slow_senders_hold_up_nobody(tmp_path: Path, house: House) -> None:
    async def act(site: SecuredSite) -> None:
        host, _, port = site.address.partition(":")
        lorises = [socket.create_connection((host, int(port)), 5.0) for _ in range(64)]
        try:
            for loris in lorises:
                loris.sendall(b"\x16")  # the first byte of a handshake that never comes
            good = await enter(site, house, "good")
            reply = await good.client.lease_group(LeaseRequest(good.worker_id, 0, 2, 5.0))
            assert len(reply.leases) == 2
        finally:
            for loris in lorises:
                loris.close()

    run(tmp_path, house, act)
