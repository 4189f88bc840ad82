"""Bad input and faults meet one clear sentence; repetitions meet the answer they had before."""

import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from antiphon.core.checks import MOST_PLACES
from antiphon.core.config import RunConfig
from antiphon.core.coordinator import consequences
from antiphon.core.coordinator.workers import check_claims
from antiphon.core.drafting.config import DraftingSection
from antiphon.core.errors import (
    ConfigError,
    ContractError,
    IntegrityError,
    UnavailableError,
)
from antiphon.core.loop import admission
from antiphon.core.loop.run_state import RunState
from antiphon.core.records import (
    GroupRewards,
    GroupSubmission,
    Lease,
    SampleReward,
    StepCommit,
    SubmitVerdict,
)
from antiphon.core.requests import LeaseReply, LeaseRequest, WorkerHeartbeat
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.prompts import EnvironmentPrompts
from antiphon.services.coordinator.server import JOURNAL_NAME
from tests.support.light_parties import Served, hello, run_parties, sample_lease, served
from tests.support.loop_model import RUN_ID, light_manifest, make_config

CONFIG = make_config(steps=4, max_staleness=0, filter_="none")


def serve_and(
    tmp_path: Path, act: Callable[[Served, CoordinatorClient], Awaitable[None]], config: RunConfig = CONFIG
) -> None:
    async def run() -> None:
        async with served(config, tmp_path) as site:
            async with asyncio.timeout(60.0):
                await act(site, site.client())

    asyncio.run(run())


async def leased(client: CoordinatorClient, groups: int = 1) -> tuple[str, LeaseReply]:
    await client.announce_snapshot(light_manifest(0))
    await client.open_step(0)
    worker = await client.register(hello())
    reply = await client.lease_group(LeaseRequest(worker.worker_id, 0, groups, 5.0))
    assert len(reply.leases) == groups
    return worker.worker_id, reply


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (hello(protocol=99), "speaks protocol version 99, but this coordinator speaks"),
        (hello(run_id="other"), "means to serve run 'other', but this coordinator serves 'run-1'"),
        (hello(name="../w"), "worker name '../w' cannot be used"),
    ],
)
def test_strangers_are_refused(tmp_path: Path, greeting: object, words: str) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        with pytest.raises(ContractError, match=words):
            await client.register(greeting)  # type: ignore[arg-type]
        assert (await client.register(hello(run_id=""))).run_id == RUN_ID

    serve_and(tmp_path, act)


def test_unknown_worker_is_told_to_register_again(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        beat = WorkerHeartbeat("ghost-1", None, None, (), 0, 0.0, 0.0)
        assert not (await client.heartbeat(beat)).known
        reply = await client.lease_group(LeaseRequest("ghost-1", 0, 1, 5.0))
        assert reply.leases == () and "register again" in reply.reason

    serve_and(tmp_path, act)


def test_submission_is_accepted_once(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        worker_id, reply = await leased(client)
        good = sample_lease(reply.leases[0], worker_id, 0)
        other = sample_lease(reply.leases[0], worker_id, 0)
        short = dataclasses.replace(other, trajectories=other.trajectories[:1])
        with pytest.raises(ContractError, match="hand in whole groups"):
            await client.submit_group(short)
        forged = dataclasses.replace(good, lease_id="0" * 32)
        with pytest.raises(ContractError, match="was never granted"):
            await client.submit_group(forged)
        assert await client.submit_group(good) is SubmitVerdict.ACCEPTED
        assert await client.submit_group(good) is SubmitVerdict.ALREADY_ACCEPTED
        changed = dataclasses.replace(
            good,
            trajectories=tuple(dataclasses.replace(t, token_ids=t.token_ids + 1) for t in good.trajectories),
        )
        assert await client.submit_group(changed) is SubmitVerdict.CONFLICT
        unknown = dataclasses.replace(good, group_id="g9999999")
        assert await client.submit_group(unknown) is SubmitVerdict.LATE

    serve_and(tmp_path, act)


def test_expired_lease_is_offered_again_and_late_work_is_still_used(tmp_path: Path) -> None:
    config = make_config(steps=4, max_staleness=0, filter_="none", lease_s=1.0, heartbeat_s=5.0)

    async def act(site: Served, client: CoordinatorClient) -> None:
        worker_id, reply = await leased(client, groups=3)
        while (await client.status()).groups_open < 3:
            await asyncio.sleep(0.05)
        assert (await client.status()).groups_requeued == 3
        again = await client.lease_group(LeaseRequest(worker_id, 0, 1, 5.0))
        assert again.leases[0].attempt == 2 and again.leases[0].group_id == reply.leases[0].group_id
        assert again.leases[0].seeds == reply.leases[0].seeds
        first, second, _ = (sample_lease(lease, worker_id, 0) for lease in reply.leases)
        assert await client.submit_group(first) is SubmitVerdict.ACCEPTED  # before the next holder did
        assert await client.submit_group(second) is SubmitVerdict.ACCEPTED  # no one else has it
        assert (await client.status()).groups_requeued == 3

    serve_and(tmp_path, act, config)


def test_lost_workers_leases_are_requeued(tmp_path: Path) -> None:
    config = make_config(steps=4, max_staleness=0, filter_="none", heartbeat_s=0.4)

    async def act(site: Served, client: CoordinatorClient) -> None:
        worker_id, _ = await leased(client, groups=2)
        while (await client.status()).groups_requeued < 2:
            await asyncio.sleep(0.05)
        status = await client.status()
        assert [str(worker.state) for worker in status.workers] == ["lost"]
        beat = WorkerHeartbeat(worker_id, 0, None, (), 0, 0.0, 1.0)
        assert not (await client.heartbeat(beat)).known
        assert "no worker is active" in status.waiting

    serve_and(tmp_path, act, config)


def test_worker_of_the_same_name_replaces_its_predecessor(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        first_id, reply = await leased(client)
        second = await client.register(hello())
        assert second.worker_id != first_id
        granted = await client.lease_group(LeaseRequest(second.worker_id, 0, 1, 5.0))
        assert granted.leases[0].group_id == reply.leases[0].group_id
        ids = (reply.leases[0].lease_id,)
        beat = WorkerHeartbeat(second.worker_id, 0, None, ids, 0, 0.0, 1.0)
        assert (await client.heartbeat(beat)).cancelled_leases == ids

    serve_and(tmp_path, act)


def test_worker_with_other_weights_is_refused(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        worker_id, _ = await leased(client)
        beat = WorkerHeartbeat(worker_id, 0, "f" * 64, (), 0, 0.0, 1.0)
        with pytest.raises(ContractError, match="load the announced snapshot again"):
            await client.heartbeat(beat)

    serve_and(tmp_path, act)


def test_a_version_that_was_never_announced_moves_nothing(tmp_path: Path) -> None:
    """How far all may run ahead follows from the newest version that is held."""

    async def act(site: Served, client: CoordinatorClient) -> None:
        worker_id, _ = await leased(client)
        with pytest.raises(ContractError, match="holds version 9, which was never announced"):
            await client.lease_group(LeaseRequest(worker_id, 9, 1, 0.05))
        with pytest.raises(ContractError, match="holds version 9, which was never announced"):
            await client.heartbeat(WorkerHeartbeat(worker_id, 9, None, (), 0, 0.0, 1.0))
        assert site.service.state_machine.loop.fleet.newest_held() == 0

    serve_and(tmp_path, act)


def test_gate_holds_at_the_lease_and_opens_with_a_newer_version(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        worker_id, reply = await leased(client, groups=3)
        await client.open_step(1)
        refused = await client.lease_group(LeaseRequest(worker_id, 0, 4, 0.05))
        assert refused.leases == ()
        assert "the next group would train at step 1, beyond the bound of 0 for version 0" in refused.reason
        for lease in reply.leases:
            await client.submit_group(sample_lease(lease, worker_id, 0))
        for group in (await client.pull_for_reward("j", 10, 5.0)).groups:
            rewards = [SampleReward(i, float(i)) for i in range(2)]
            assert await client.submit_rewards([GroupRewards(group.group_id, tuple(rewards))])
            assert not await client.submit_rewards([GroupRewards(group.group_id, tuple(rewards))])
        batch = (await client.await_stage("reward", 0, 10.0)).batch
        assert batch is not None
        await client.commit_step(StepCommit(0, 1, light_manifest(1).weights_digest, batch.digest))
        waiting = asyncio.ensure_future(client.lease_group(LeaseRequest(worker_id, 0, 4, 20.0)))
        await client.announce_snapshot(light_manifest(1))
        told = await waiting  # long before its time is over
        assert told.leases == () and told.newest_version == 1
        assert len((await client.lease_group(LeaseRequest(worker_id, 1, 4, 5.0))).leases) == 3

    serve_and(tmp_path, act)


def test_commits_are_exactly_once_and_in_order(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        await run_parties(client, CONFIG, seed=1)
        commits = await client.commits(-1)
        assert [commit.step for commit in commits] == [0, 1, 2, 3]
        assert [commit.step for commit in await client.commits(1)] == [2, 3]
        await client.commit_step(commits[2])  # a repetition changes nothing
        for wrong, words in [
            (dataclasses.replace(commits[2], weights_digest="0" * 64), "was committed with weights"),
            (dataclasses.replace(commits[2], version=7), "makes version 3, but the commit says 7"),
            (dataclasses.replace(commits[3], step=9, version=10), "so step 4 is next"),
            (dataclasses.replace(commits[3], step=4, version=5), "its batch is not sealed yet"),
        ]:
            with pytest.raises(IntegrityError, match=words):
                await client.commit_step(wrong)
        assert (await client.status()).committed_steps == 4

    serve_and(tmp_path, act)


def test_snapshots_must_fit_the_run(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        assert await client.latest_manifest(None) is None
        with pytest.raises(ContractError, match="a snapshot of run 'x' was announced to run 'run-1'"):
            await client.announce_snapshot(light_manifest(0, run_id="x"))
        with pytest.raises(IntegrityError, match="version 1 was announced, but only 0 steps"):
            await client.announce_snapshot(light_manifest(1))
        await client.announce_snapshot(light_manifest(0))
        moved = light_manifest(0, origin="127.0.0.1:2")
        await client.announce_snapshot(moved)
        assert await client.latest_manifest(None) == moved == await client.latest_manifest(0)
        assert await client.latest_manifest(7) is None
        with pytest.raises(IntegrityError, match="version 0 was announced with weights"):
            await client.announce_snapshot(dataclasses.replace(moved, weights_digest="0" * 64))

    serve_and(tmp_path, act)


def test_steps_and_evaluations_outside_the_run_are_refused(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        with pytest.raises(ContractError, match=r"step 4 cannot be opened: run\.steps=4"):
            await client.open_step(4)
        with pytest.raises(ContractError, match="version 5 cannot be evaluated"):
            await client.open_evaluation(5)
        await client.finish()
        await client.finish()
        with pytest.raises(ContractError, match="is finished"):
            await client.open_step(0)

    serve_and(tmp_path, act)


def test_waiting_is_explained(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        assert "step 0 is not open yet" in (await client.await_stage("reward", 0, 0.0)).waiting_for
        worker_id, reply = await leased(client, groups=2)
        words = (await client.await_stage("reward", 0, 0.0)).waiting_for
        assert "0 of 3 groups rewarded; 2 being sampled (2 at w-1;" in words
        assert "1 not issued yet (w-1 holds 0)" in words
        await client.submit_group(sample_lease(reply.leases[0], worker_id, 0))
        status = await client.status()
        assert (status.groups_leased, status.groups_to_reward) == (1, 1)
        assert "1 to reward (0 at a reward service)" in status.waiting

    serve_and(tmp_path, act)


def test_payloads_of_old_steps_are_deleted(tmp_path: Path) -> None:
    config = make_config(steps=6, filter_="none")

    async def act(site: Served, client: CoordinatorClient) -> None:
        await run_parties(client, config, seed=1)
        kept = site.service.state_machine.state.sealed_groups
        assert sorted(kept) == [3, 4, 5]  # payload_retention_steps = 2 before the last
        engine = sa.create_engine(f"sqlite:///{tmp_path / JOURNAL_NAME}")
        with engine.connect() as connection:
            names = {row[0] for row in connection.execute(sa.text("select name from payloads"))}
        engine.dispose()
        groups = {name for name in names if name.startswith("g")}
        alive = {g for g, group in site.service.state_machine.state.groups.items() if group.attempt}
        expected = {group_id for ids in kept.values() for group_id in ids}
        assert expected <= groups <= expected | alive

    serve_and(tmp_path, act, config)


def test_a_journal_that_never_gets_space_stops_the_coordinator_in_words(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        await leased(client)
        journal = site.service.state_machine.journal
        journal._retry_s = journal._longest_wait_s = 0.0
        await journal._in_thread(lambda: no_more_pages(journal))
        with pytest.raises(UnavailableError, match="no space is left for the journal"):
            while True:  # what is freed within a page still takes a few
                await client.register(hello())
        assert site.service.state_machine.failed.is_set()
        with pytest.raises(UnavailableError, match="no space is left for the journal"):
            await client.status()

    serve_and(tmp_path, act)


def no_more_pages(journal: Journal) -> None:
    """Have SQLite itself refuse to grow: the same error as a full disk."""
    with journal._store._connection.begin() as transaction:  # type: ignore[attr-defined]
        transaction.connection.exec_driver_sql("PRAGMA max_page_count = 1")  # means: as many as there are


def test_full_disk_is_told_apart(tmp_path: Path) -> None:
    async def run() -> None:
        journal = Journal(tmp_path / JOURNAL_NAME, RUN_ID, retry_s=0.0, longest_wait_s=0.0)
        await journal._in_thread(lambda: no_more_pages(journal))
        with pytest.raises(UnavailableError, match="no space is left for the journal"):
            await journal.enqueue([], {"big": b"x" * 1_000_000})
        with pytest.raises(UnavailableError, match="no space is left for the journal"):
            journal.enqueue([], {"small": b"x"})
        await journal.close()

    asyncio.run(run())


def test_an_unwritable_store_holds_the_run_up_in_words_until_it_can_be_written(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        (tmp_path / "store").write_text("in the way")
        parties = asyncio.ensure_future(run_parties(client, CONFIG, seed=1))
        while "cannot use" not in (status := await client.status()).waiting:
            await asyncio.sleep(0.01)
        assert re.search(r"cannot use .*store: ", status.waiting)
        worker = await site.client().status()
        assert worker.sealed_steps == 0
        with pytest.raises(UnavailableError, match=r"cannot use .*may be written"):
            await client.lease_group(LeaseRequest("w0-1", 0, 1, 0.0))
        (tmp_path / "store").unlink()
        await parties
        assert (await client.status()).finished

    serve_and(tmp_path, act)


def test_journal_that_is_none_or_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    asyncio.run(Journal(path, "run-1").close())
    with pytest.raises(ConfigError, match="belongs to run 'run-1', not to 'run-2'"):
        Journal(path, "run-2")
    path.write_bytes(b"not a database, but long enough to be looked at" * 50)
    with pytest.raises(IntegrityError, match="damaged or no journal"):
        Journal(path, "run-1")
    with pytest.raises(UnavailableError, match="cannot be opened"):
        Journal(tmp_path / "missing" / JOURNAL_NAME, "run-1")


def test_prompt_that_does_not_fit_is_named() -> None:
    class OneProblem:
        name = "light"

        def problem(self, split: str, index: int) -> object:
            return type("P", (), {"key": f"{split}-0-{index}", "text": "x" * (index + 1)})()

    class Letters:
        def encode_prompt(self, text: str) -> tuple[int, ...]:
            return tuple(map(ord, text))

    prompts = EnvironmentPrompts(OneProblem(), Letters(), max_prompt_tokens=4)  # type: ignore[arg-type]
    assert prompts.prompt("train", 3).token_ids == (120,) * 4
    prompts.check_all(train=4, heldout=2)
    with pytest.raises(ConfigError, match="prompt heldout-0-4 has 5 tokens"):
        prompts.check_all(train=4, heldout=5)


def test_a_group_that_is_judged_while_its_payload_is_read_is_not_handed_out(tmp_path: Path) -> None:
    config = make_config(steps=4).model_copy(update={"drafting": DraftingSection(enabled=False)})

    async def act(site: Served, client: CoordinatorClient) -> None:
        state_machine = site.service.state_machine
        await client.announce_snapshot(light_manifest(0))
        await client.open_evaluation(0)
        worker_id = (await client.register(hello())).worker_id
        (lease, *_) = (await client.lease_group(LeaseRequest(worker_id, 0, 1, 5.0))).leases
        assert await client.submit_group(sample_lease(lease, worker_id, 0)) is SubmitVerdict.ACCEPTED
        state_machine.submissions._known.clear()  # as after a restart, which a judge outlived with its group
        reading, rewarded, on_disk = asyncio.Event(), asyncio.Event(), state_machine.journal.payload

        async def slowly(name: str) -> bytes | None:
            reading.set()
            await rewarded.wait()
            return await on_disk(name)

        state_machine.journal.payload = slowly  # type: ignore[method-assign]
        pulling = asyncio.ensure_future(site.service.pull_for_reward("late", 1, 0.0))
        await reading.wait()
        assert await site.service.submit_rewards(
            [GroupRewards(lease.group_id, tuple([SampleReward(0, 1.0)]))]
        )
        rewarded.set()
        assert (await pulling).groups == ()

    serve_and(tmp_path, act, config)


def test_an_evaluation_that_can_never_end_is_refused_in_words(tmp_path: Path) -> None:
    whole = make_config(steps=8, max_staleness=0)
    config = whole.model_copy(update={"broadcast": whole.broadcast.model_copy(update={"snapshots_kept": 2})})

    async def act(site: Served, client: CoordinatorClient) -> None:
        site.service.state_machine.state.opened_steps = 6
        with pytest.raises(ContractError, match=r"version 4 cannot .* newest 2 snapshots are kept"):
            await client.open_evaluation(4)
        await client.open_evaluation(5)

    serve_and(tmp_path, act, config)


def test_held_out_prompts_that_a_worker_leaves_lying_are_sampled_by_one_that_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be behind a slow link for ever, or only say that it samples."""
    find, looks = admission.version_to_evaluate, 0

    def counted(state: RunState, config: RunConfig) -> int | None:
        nonlocal looks
        looks += 1
        return find(state, config)

    async def act(site: Served, client: CoordinatorClient) -> None:
        await client.announce_snapshot(light_manifest(0))
        state = site.service.state_machine.state
        state.snapshots[1], state.newest_version = "of a step whose training is left out here", 1
        await client.open_evaluation(0)
        names = ["newer", *(f"idle{number}" for number in range(4))]
        newer, *idle = [(await client.register(hello(name))).worker_id for name in names]
        for worker in idle:
            await client.heartbeat(WorkerHeartbeat(worker, 0, None, (), 0, 0.0, 0.0))
        await client.heartbeat(WorkerHeartbeat(newer, 1, None, (), 0, 0.0, 0.0))
        monkeypatch.setattr(admission, "version_to_evaluate", counted)
        wanted = [(await client.lease_group(LeaseRequest(newer, 1, 1, 0.0))).wanted_version]
        assert looks <= 2
        while wanted[-1] is None:
            for worker in idle:
                await client.heartbeat(WorkerHeartbeat(worker, 0, None, (), 0, 0.0, 0.0))
            wanted.append((await client.lease_group(LeaseRequest(newer, 1, 1, 0.1))).wanted_version)
        assert wanted[0] is None and wanted[-1] == 0

    serve_and(tmp_path, act, make_config(steps=4, filter_="none", evaluation_prompts=2, lease_s=0.5))


def test_a_worker_may_hold_a_lease_for_each_held_out_prompt_that_its_places_take() -> None:
    leases = tuple(str(number) for number in range(MOST_PLACES + 1))
    beat = WorkerHeartbeat("w-1", 0, None, leases, 0, 0.0, 0.0)
    check_claims(beat, 2)
    with pytest.raises(ContractError, match="the length of lease_ids of a heartbeat is 4097"):
        check_claims(beat, 1)


def test_two_reward_services_that_answer_at_once_reward_a_group_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        worker_id, reply = await leased(client)
        await client.submit_group(sample_lease(reply.leases[0], worker_id, 0))
        machine, both, at_work = site.service.state_machine, asyncio.Event(), 0
        find = machine.submissions.find

        async def at_the_same_time(group_id: str) -> GroupSubmission | None:
            nonlocal at_work
            at_work += 1
            if at_work == 2:
                both.set()
            await both.wait()
            return await find(group_id)

        monkeypatch.setattr(machine.submissions, "find", at_the_same_time)
        monkeypatch.setattr(type(machine.archive), "keeps", property(lambda self: True))
        monkeypatch.setattr(machine.archive, "take", lambda *told: None)
        given = GroupRewards(reply.leases[0].group_id, (SampleReward(0, 1.0), SampleReward(1, 0.0)))
        taken = await asyncio.gather(*(site.service.submit_rewards([given]) for _ in range(2)))
        assert sorted(map(len, taken)) == [0, 1]

    serve_and(tmp_path, act)


def test_leases_of_a_worker_that_hung_up_are_offered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        await client.announce_snapshot(light_manifest(0))
        await client.open_step(0)
        worker = await client.register(hello())
        granted = asyncio.Event()

        async def attach(leases: list[Lease]) -> list[Lease]:
            granted.set()
            await asyncio.Event().wait()
            return leases

        machine = site.service.state_machine
        monkeypatch.setattr(machine.archive, "attach", attach)
        asking = asyncio.ensure_future(
            site.service.lease_group(LeaseRequest(worker.worker_id, 0, 2, 5.0, wants_history=True))
        )
        await granted.wait()
        assert len(machine.loop.leases) == 2
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert len(machine.loop.leases) == 0 and len(machine.state.open_groups) == 2

    serve_and(tmp_path, act)


def test_a_group_whose_engine_hung_gives_its_place_to_those_behind_it(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        worker_id, _ = await leased(client, groups=3)
        machine = site.service.state_machine
        first, *others = [group.group_id for group in machine.state.training()]
        (held,) = [held for held in machine.loop.leases.of_worker(worker_id) if held.group_id == first]
        machine.run(
            consequences.take_back(machine.loop, held, "its engine stands still", machine.clock(), hung=True)
        )
        assert [group.group_id for group in machine.state.training()] == [*others, first]

    serve_and(tmp_path, act)
