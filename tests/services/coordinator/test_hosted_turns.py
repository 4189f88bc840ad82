"""Turns that a host was told of outlive the coordinator and the worker that sampled them."""

import asyncio
from pathlib import Path

import numpy as np

from antiphon.core.coordinator import consequences, turns
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.records import FinishReason, PartialTrajectory, TurnAnswer, VersionSpan
from antiphon.core.requests import LeaseRequest, TurnReply, TurnRequest
from antiphon.core.spans import rest_of
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.store import WriteBatch
from tests.support.light_environment import LightHostedPrompts, LightTurnPrompts
from tests.support.light_parties import hello, served
from tests.support.loop_model import light_manifest, make_config

CONFIG = make_config(mode="fixed", steps=4, filter_="none", prompts_per_step=4)


def row(tokens: list[int], spans: list[tuple[int, int]], breaks: tuple[int, ...] = ()) -> PartialTrajectory:
    """Return a row of sample 0 in which all but the spans was observed."""
    ends = [0, *(place for span in spans for place in span)]
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    for start, stop in spans:
        logprobs[start:stop] = -0.1 * np.arange(1, stop - start + 1)
    return PartialTrajectory(
        np.array(tokens, dtype=np.int32),
        logprobs,
        tuple(VersionSpan(0, start, stop) for start, stop in spans),
        FinishReason.STOP,
        sample_index=0,
        observed=tuple(zip(ends[::2], ends[1::2], strict=False)),
        breaks=breaks,
    )


FIRST = row([3, 4, 5, 6], [(2, 4)])
SECOND = row([3, 4, 5, 6, 7, 8, 9], [(2, 4), (6, 7)], (4,))


async def converse(
    client: CoordinatorClient, worker_id: str, lease_id: str, rows: int = 3
) -> list[TurnReply]:
    """Ask about up to three rows of sample 0, one after the other, and be the host that answers two."""
    said = {0: ((3, 4), False), 4: ((7, 8), True), 7: ((), False)}
    replies = []
    for asked in (row([], []), FIRST, rest_of(SECOND, 4))[:rows]:
        assert asked is not None

        async def ask(piece: PartialTrajectory = asked) -> TurnReply:
            return await client.answer_turn(TurnRequest(worker_id, lease_id, piece, 5.0))

        asking = asyncio.ensure_future(ask())
        (question,) = await client.pull_turns("gateway", 8, 5.0)
        tokens, fresh = said[question.token_ids.size]
        if tokens:
            named = question.group_id, question.sample_index, question.row_digest
            await client.submit_turns([TurnAnswer(*named, tokens, fresh=fresh, host="h")])
            replies.append(await asking)
        asking.cancel()
    return replies


def test_a_restarted_coordinator_has_the_rows_and_the_next_worker_goes_on_from_there(tmp_path: Path) -> None:
    async def run() -> None:
        prompts = LightHostedPrompts(turns=3, tokens=40)
        async with served(CONFIG, tmp_path, prompts=prompts, snapshot_every=3) as site:
            client = site.client()
            await client.announce_snapshot(light_manifest(0))
            await client.open_step(0)
            first = (await client.register(hello("first"))).worker_id
            (lease,) = (await client.lease_group(LeaseRequest(first, 0, 1, 5.0))).leases
            assert lease.prompt_token_ids == () and lease.limits is not None and lease.limits.hosted
            replies = await converse(client, first, lease.lease_id)
            assert [(reply.token_ids, reply.fresh) for reply in replies] == [((3, 4), False), ((7, 8), True)]
        async with served(CONFIG, tmp_path, prompts=prompts) as site, asyncio.timeout(60.0):
            client, machine = site.client(), site.service.state_machine
            held = machine.loop.leases.get(lease.lease_id)
            assert held is not None
            machine.run(consequences.take_back(machine.loop, held, "no sign of life", machine.clock()))
            second = (await client.register(hello("second"))).worker_id
            (again,) = (await client.lease_group(LeaseRequest(second, 0, 1, 5.0))).leases
            assert (again.group_id, again.attempt) == (lease.group_id, 2)
            (kept,) = again.prefix
            assert kept.token_ids.tolist() == SECOND.token_ids.tolist()
            assert kept.logprobs.tobytes() == SECOND.logprobs.tobytes()
            assert (kept.spans, kept.observed, kept.breaks) == (SECOND.spans, SECOND.observed, SECOND.breaks)
            assert kept.finish_reason is FinishReason.STOP
            # What was answered is answered again; what waited is asked for again, with all of its row.
            request = TurnRequest(second, again.lease_id, FIRST, 5.0)
            assert (await client.answer_turn(request)).token_ids == (7, 8)
            asking = asyncio.ensure_future(
                client.answer_turn(TurnRequest(second, again.lease_id, rest_of(SECOND, 6) or SECOND, 5.0))
            )
            (question,) = await client.pull_turns("gateway", 8, 5.0)
            assert question.token_ids.tolist() == SECOND.token_ids.tolist()
            assert question.logprobs.tobytes() == SECOND.logprobs.tobytes()
            asking.cancel()

    asyncio.run(run())


def test_no_host_hears_of_a_turn_before_it_is_on_the_disk(tmp_path: Path) -> None:
    async def run() -> None:
        prompts = LightHostedPrompts(turns=3, tokens=40)
        async with served(CONFIG, tmp_path, prompts=prompts) as site, asyncio.timeout(60.0):
            service, journal = site.service, site.service.state_machine.journal
            client = site.client()
            await client.announce_snapshot(light_manifest(0))
            await client.open_step(0)
            worker_id = (await client.register(hello("first"))).worker_id
            (lease,) = (await client.lease_group(LeaseRequest(worker_id, 0, 1, 5.0))).leases
            assert await converse(client, worker_id, lease.lease_id, rows=1)
            gate, write = asyncio.Event(), journal._write

            async def gated(batch: WriteBatch) -> None:
                await gate.wait()
                await write(batch)

            journal._write = gated  # type: ignore[method-assign]
            asking = asyncio.ensure_future(
                service.answer_turn(TurnRequest(worker_id, lease.lease_id, FIRST, 5.0))
            )
            pulling = asyncio.ensure_future(service.pull_turns("gateway", 8, 5.0))
            try:
                for _ in range(10):  # it has looked, and would have found the question
                    await asyncio.sleep(0)
                assert not pulling.done()
            finally:
                gate.set()
            (question,) = await pulling
            assert question.token_ids.tolist() == FIRST.token_ids.tolist()
            asking.cancel()

    asyncio.run(run())


def test_a_reward_service_hears_which_groups_hosts_are_waited_for(tmp_path: Path) -> None:
    async def run() -> None:
        prompts = LightHostedPrompts(turns=3, tokens=40)
        async with served(CONFIG, tmp_path, prompts=prompts) as site, asyncio.timeout(60.0):
            client, loop = site.client(), site.service.state_machine.loop
            await client.announce_snapshot(light_manifest(0))
            await client.open_step(0)
            worker_id = (await client.register(hello("first"))).worker_id
            (lease,) = (await client.lease_group(LeaseRequest(worker_id, 0, 1, 5.0))).leases
            told = (await client.pull_for_reward("gateway", 8, 0.0)).unfinished
            assert lease.group_id in told and {*told} == {*loop.run.groups}
            loop.run.groups[lease.group_id].phase = GroupPhase.SUBMITTED
            assert lease.group_id not in turns.unfinished(loop)
        (own := tmp_path / "own").mkdir()
        async with served(CONFIG, own, prompts=LightTurnPrompts()) as site:
            await site.client().open_step(0)
            assert (await site.client().pull_for_reward("own", 8, 0.0)).unfinished == ()

    asyncio.run(run())


def test_a_question_that_waits_for_a_host_comes_again_at_the_same_pace(tmp_path: Path) -> None:
    async def run() -> None:
        prompts = LightHostedPrompts(turns=3, tokens=40)
        async with served(CONFIG, tmp_path, prompts=prompts) as site, asyncio.timeout(60.0):
            client, loop = site.client(), site.service.state_machine.loop
            await client.announce_snapshot(light_manifest(0))
            await client.open_step(0)
            worker_id = (await client.register(hello("first"))).worker_id
            (lease,) = (await client.lease_group(LeaseRequest(worker_id, 0, 1, 5.0))).leases
            request = TurnRequest(worker_id, lease.lease_id, row([], []), 5.0)
            asking = asyncio.ensure_future(client.answer_turn(request))
            await client.pull_turns("gateway", 8, 5.0)
            (turn,) = loop.turns.values()
            gaps = []
            for _ in range(5):
                now = turn.deadline_s
                (again,) = turns.to_answer(loop, "gateway", 8, now)
                assert again.row_digest == turn.question.row_digest
                assert turns.to_answer(loop, "gateway", 8, now) == []
                gaps.append(turn.deadline_s - now)
            assert len(set(gaps)) == 1 and gaps[0] > 0.0
            asking.cancel()

    asyncio.run(run())
