"""A worker's stream: answers and errors as of calls, and nothing lost when it breaks."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.records import SubmitVerdict
from antiphon.core.requests import LeaseRequest, WorkerHeartbeat
from antiphon.net import wire
from antiphon.protos import records_pb2, rollout_pb2
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.work_stream import MOST_OPEN, TOGETHER_BYTES, StreamServer
from tests.support.light_parties import (
    LightWorker,
    Served,
    hello,
    reward_all,
    sample_lease,
    served,
    train_all,
)
from tests.support.loop_model import light_manifest, make_config

CONFIG = make_config(lease_s=30.0, speculation=0.0)  # a duplicate is acknowledged to both


def beat(worker_id: str, leases: tuple[str, ...] = ()) -> WorkerHeartbeat:
    return WorkerHeartbeat(worker_id, None, None, leases, 0, 0.0, 1.0)


def together(*requests: Any) -> Any:
    return rollout_pb2.WorkRequests(requests=requests)


async def stream_to(site: Served) -> CoordinatorClient:
    client = CoordinatorClient(site.address)
    site.clients.append(client)
    await client.announce_snapshot(light_manifest(0))
    await client.open_step(2)
    return client


def test_a_whole_run_over_streams(tmp_path: Path) -> None:
    async def act() -> None:
        async with served(CONFIG, tmp_path) as site:
            crew = [LightWorker(await stream_to(site), f"w{i}", np.random.default_rng(i)) for i in range(3)]
            rewarding = asyncio.ensure_future(reward_all(site.client(), np.random.default_rng(9)))
            working = [asyncio.ensure_future(worker.run()) for worker in crew]
            async with asyncio.timeout(60.0):
                refs = await train_all(site.client(), CONFIG, site.store)
                await asyncio.gather(*working)
            rewarding.cancel()
            assert len(refs) == CONFIG.run.steps
            accepted = [g for worker in crew for g in worker.acknowledged]
            assert len(accepted) == len(set(accepted)) and accepted

    asyncio.run(act())


def test_answers_come_in_their_own_time_and_errors_as_themselves(tmp_path: Path) -> None:
    async def act() -> None:
        async with served(CONFIG, tmp_path) as site:
            client = await stream_to(site)
            worker_id = (await client.register(hello())).worker_id
            first = await client.lease_group(LeaseRequest(worker_id, 0, 9, 1.0))
            waiting = asyncio.ensure_future(client.lease_group(LeaseRequest(worker_id, 0, 1, 20.0)))
            answer = await client.heartbeat(beat(worker_id))  # not behind the lease that waits
            assert answer.known and not waiting.done()
            submission = sample_lease(first.leases[0], worker_id, 0)
            assert await client.submit_group(submission) is SubmitVerdict.ACCEPTED
            assert await client.submit_group(submission) is SubmitVerdict.ALREADY_ACCEPTED
            stray = sample_lease(first.leases[1], worker_id, 0)
            with pytest.raises(ContractError, match="was never granted"):
                await client.submit_group(
                    type(stray)("f" * 32, stray.group_id, worker_id, stray.trajectories, 0.0)
                )
            wrong = WorkerHeartbeat(worker_id, 0, "0" * 64, (), 0, 0.0, 1.0)
            with pytest.raises(ContractError, match="load the announced snapshot again"):
                await client.heartbeat(wrong)
            waiting.cancel()

    asyncio.run(act())


def test_what_arrived_is_kept_as_it_was_without_fields_that_nobody_knows(tmp_path: Path) -> None:
    async def act() -> None:
        async with served(CONFIG, tmp_path) as site:
            client = await stream_to(site)
            worker_id = (await client.register(hello())).worker_id
            (lease,) = (await client.lease_group(LeaseRequest(worker_id, 0, 1, 1.0))).leases
            message = wire.group_submission_to_proto(sample_lease(lease, worker_id, 0))
            known = message.SerializeToString()
            message.MergeFromString(b"\xfa\x7f\x05extra")  # field 2047, which no version has
            assert message.SerializeToString() != known
            reply = await wire.WORK_CALLS["submission"].answer(site.service, message)
            assert reply.verdict == "accepted"
            assert await site.service.state_machine.journal.payload(lease.group_id) == known

    asyncio.run(act())


def test_a_lease_that_nobody_waits_for_any_more_is_not_granted(tmp_path: Path) -> None:
    async def act() -> None:
        async with served(make_config(lease_s=30.0, max_staleness=0), tmp_path) as site:
            client = CoordinatorClient(site.address)
            site.clients.append(client)
            await client.announce_snapshot(light_manifest(0))
            worker_id = (await client.register(hello())).worker_id
            await client.heartbeat(WorkerHeartbeat(worker_id, 0, None, (), 0, 0.0, 1.0))
            waiting = asyncio.ensure_future(client.lease_group(LeaseRequest(worker_id, 0, 1, 20.0)))
            await client.heartbeat(beat(worker_id))
            waiting.cancel()
            await client.heartbeat(beat(worker_id))  # behind the cancellation
            await client.open_step(0)
            status = await client.status()
            assert status.groups_leased == 0

    asyncio.run(act())


def test_a_broken_stream_is_opened_again_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    async def act() -> None:
        client = None
        async with served(CONFIG, tmp_path) as site:
            address = site.address
            client = CoordinatorClient(address, timeout_s=5.0)
            await client.announce_snapshot(light_manifest(0))
            await client.open_step(2)
            worker_id = (await client.register(hello())).worker_id
            (lease,) = (await client.lease_group(LeaseRequest(worker_id, 0, 1, 1.0))).leases
            submission = sample_lease(lease, worker_id, 0)
            assert await client.submit_group(submission) is SubmitVerdict.ACCEPTED
        with pytest.raises(UnavailableError):
            await client.heartbeat(beat(worker_id))
        async with served(CONFIG, tmp_path, port=int(address.rpartition(":")[2])):
            async with asyncio.timeout(30.0):
                while True:
                    try:
                        assert await client.submit_group(submission) is SubmitVerdict.ALREADY_ACCEPTED
                        break
                    except UnavailableError:
                        await asyncio.sleep(0.05)
        await client.close()

    asyncio.run(act())


class BrokenStream:
    """A call that was broken off while something was written into it; also the channel that makes it."""

    def unary_unary(self, *_: object, **__: object) -> None:
        """It is not called."""

    unary_stream = unary_unary

    def stream_stream(self, *_: object, **__: object) -> Any:
        return lambda: self

    async def write(self, request: object) -> None:
        raise asyncio.InvalidStateError

    async def __aiter__(self) -> AsyncIterator[object]:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, nothing, nothing, details="Internal error from Core"
        )
        yield

    def cancel(self) -> None:
        """It has ended."""


def test_a_write_into_a_stream_that_just_broke_is_a_peer_that_is_away() -> None:
    async def act() -> None:
        with pytest.raises(UnavailableError, match="Internal error from Core"):
            await CoordinatorClient("a:1", channel=BrokenStream()).heartbeat(beat("w-1"))

    asyncio.run(act())


def test_what_is_ready_together_travels_together_and_a_large_message_by_itself() -> None:
    async def echo(request: Any) -> Any:
        return rollout_pb2.SubmitReply(verdict="x" * len(request.worker_id))

    async def requests() -> AsyncIterator[Any]:
        submissions = [
            records_pb2.GroupSubmission(worker_id="w" * size) for size in (1, 2, 3, TOGETHER_BYTES + 1, 4)
        ]
        yield together(*(rollout_pb2.WorkRequest(id=i, submission=s) for i, s in enumerate(submissions)))

    async def act() -> None:
        server = StreamServer({"submission": echo})
        replies = [message async for message in server.serve(requests())]
        sizes = [[len(reply.submission.verdict) for reply in message.replies] for message in replies]
        assert sizes == [[1, 2, 3], [TOGETHER_BYTES + 1], [4]]

    asyncio.run(act())


def test_a_mistake_ends_the_stream_instead_of_leaving_it_silent() -> None:
    async def break_down(request: Any) -> Any:
        raise ZeroDivisionError

    async def requests() -> AsyncIterator[Any]:
        yield together(rollout_pb2.WorkRequest(id=1, heartbeat=rollout_pb2.WorkerHeartbeat()))
        await asyncio.Event().wait()

    async def act() -> None:
        server = StreamServer({"heartbeat": break_down})
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(anext(server.serve(requests())), 10.0)

    asyncio.run(act())


def test_a_stream_holds_no_more_requests_than_it_may() -> None:
    never = asyncio.Event()

    async def wait(request: Any) -> Any:
        await never.wait()

    async def requests() -> AsyncIterator[Any]:
        for number in range(MOST_OPEN + 1):
            yield together(rollout_pb2.WorkRequest(id=number, heartbeat=rollout_pb2.WorkerHeartbeat()))
        yield together(rollout_pb2.WorkRequest(id=9999))  # asks for nothing
        await never.wait()

    async def act() -> None:
        server = StreamServer({"heartbeat": wait})
        replies = server.serve(requests())
        reply = (await asyncio.wait_for(anext(replies), 10.0)).replies[0]
        assert reply.id == MOST_OPEN and "wait for answers" in reply.error.details
        await replies.aclose()

    asyncio.run(act())


def test_a_repeated_id_is_refused_and_holds_nothing_more() -> None:
    never, begun = asyncio.Event(), 0

    async def wait(request: Any) -> Any:
        nonlocal begun
        begun += 1
        await never.wait()

    async def requests() -> AsyncIterator[Any]:
        same = rollout_pb2.WorkRequest(id=7, heartbeat=rollout_pb2.WorkerHeartbeat())
        yield together(*[same] * MOST_OPEN)
        await never.wait()

    async def act() -> None:
        server = StreamServer({"heartbeat": wait})
        replies = server.serve(requests())
        found = (await asyncio.wait_for(anext(replies), 10.0)).replies
        assert len(found) == MOST_OPEN - 1 and begun <= 1
        assert "request 7 is not answered yet" in found[0].error.details
        await replies.aclose()

    asyncio.run(act())


@pytest.mark.parametrize("at_once", [True, False], ids=["a message of many", "answers that nobody reads"])
def test_a_stream_that_asks_more_than_it_reads_is_ended(at_once: bool) -> None:
    async def answer(request: Any) -> Any:
        return rollout_pb2.HeartbeatReply()

    async def requests() -> AsyncIterator[Any]:
        number = iter(range(100 * MOST_OPEN))
        for size in [MOST_OPEN + 1] if at_once else [MOST_OPEN] * 5:
            made = (rollout_pb2.WorkRequest(id=next(number), heartbeat={}) for _ in range(size))
            yield together(*made)
            for _ in range(3):
                await asyncio.sleep(0)  # they are answered

    async def act() -> None:
        server = StreamServer({"heartbeat": answer})
        reading = asyncio.ensure_future(server._read(requests()))
        with pytest.raises(ContractError, match="are allowed"):
            await asyncio.wait_for(reading, 10.0)
        assert len(server._replies) <= 3 * MOST_OPEN

    asyncio.run(act())
