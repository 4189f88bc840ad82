"""The door among faults: what is lost, cut, refused or somebody else's wedges, tells and ends nothing."""

import asyncio
import gc
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.trust.access_tokens import ANY_RUN, Scope, TokenClaims
from antiphon.net.security.access_tokens import make_token, new_token_id
from antiphon.net.security.guard import Guard
from antiphon.net.security.keys import signing_key
from antiphon.protos import tinker_pb2 as pb
from antiphon.services.door import door as door_module
from antiphon.services.door import futures as futures_module
from antiphon.services.door import journal as kept
from antiphon.services.door import server as server_module
from antiphon.services.door import wire
from antiphon.services.door.journal import open_journal
from antiphon.system.clock import wall_clock
from tests.services.door.test_door import talk
from tests.support.client_runs import MemoryRuns
from tests.support.tinker_client import BASE, TinkerClient, datum, sampling, step, training


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "TICK_S", 0.02)
    monkeypatch.setattr(door_module, "RETRY_S", 0.02)
    monkeypatch.setattr(futures_module, "RETRY_S", 0.02)


def test_what_is_of_one_owner_another_one_neither_hears_nor_lists_nor_loads(tmp_path: Path) -> None:
    signer = signing_key(bytes(32))
    guard = Guard(signer.public, ANY_RUN, wall_clock, wall_clock)
    ends = int(datetime.now(UTC).timestamp()) + 3600

    async def client(client: TinkerClient) -> None:
        model = await client.model(session := await client.session())
        call = await client.post("forward_backward", training(model, 1))
        path = (await client.done("save_weights", {"model_id": model, "seq_id": 2, "path": "mine"}))["path"]
        claims = TokenClaims(new_token_id(), ANY_RUN, "bob", (Scope.DOOR,), ends, 1)
        bob = TinkerClient(client.http, client.url, f"tml-{make_token(claims, signer)}", client.runs)
        assert (await bob.ask("POST", "retrieve_future", {"request_id": call["request_id"]}))[0] == 410
        assert (await bob.ask("GET", "checkpoints"))[1]["checkpoints"] == []
        assert (await bob.ask("GET", f"training_runs/probe-{session}-0/checkpoints"))[0] == 404
        assert (await bob.ask("POST", "weights_info", {"tinker_path": path}))[0] == 400
        own = await bob.session()
        loading = {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": True}
        assert "is not here" in await bob.refused("load_weights", loading)
        his = await bob.model(own, 1)
        assert "is not here" in await bob.refused(
            "load_weights", {"model_id": his, "seq_id": 1, "path": path}
        )
        new = {"session_id": own, "sampling_session_seq_id": 0, "model_path": path}
        assert (await bob.ask("POST", "create_sampling_session", new))[0] == 400
        await bob.done("save_weights", {"model_id": his, "seq_id": 2, "path": "his"})
        listed = [await who.ask("GET", "checkpoints") for who in (bob, client)]
        assert [len(said["checkpoints"]) for _, said in listed] == [1, 2]  # the home's own key sees all of it
        assert await client.result(call)

    talk(tmp_path, client, guard=guard)


def test_a_number_that_never_comes_is_given_up_and_the_model_goes_on(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        model = await client.model(session := await client.session())
        await client.done("forward_backward", training(model, 1))
        late = [await client.post("optim_step", step(model, number)) for number in (4, 5)]

        async def beat() -> None:
            while True:
                await client.post("session_heartbeat", {"session_id": session})
                await asyncio.sleep(0.05)

        beating = asyncio.create_task(beat())
        said = await client.result(late[0])
        assert said["category"] == "user" and "call 2" in said["error"], said
        assert "metrics" in await client.result(late[1])
        beating.cancel()
        assert "was done" in await client.refused("forward_backward", training(model, 2))

    (run,) = talk(tmp_path, client, session_timeout_s=0.5).all.values()
    assert len(run.history) == 1


def test_who_waits_for_a_number_hears_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_module, "HOLD_S", 0.1)

    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        future = await client.post("optim_step", step(model, 3))
        said = await client.post("retrieve_future", {"request_id": future["request_id"]})
        assert "call 1" in said["queue_state_reason"]

    talk(tmp_path, client)


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), RuntimeError("unforeseen")])
@pytest.mark.parametrize("where", ["call", "sample"])
def test_what_nobody_foresaw_ends_one_call_at_most_never_the_door(
    tmp_path: Path, fault: Exception, where: str
) -> None:
    runs = MemoryRuns()

    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        sampler = await client.sampler(model, 1)
        runs.faults = [(where, fault)]
        asked = {
            "call": ("forward_backward", training(model, 2)),
            "sample": ("asample", sampling(sampler, 0)),
        }
        said = await client.result(await client.post(*asked[where]))
        if isinstance(fault, RuntimeError):
            assert said["category"] == "server" and "unforeseen" in said["error"]
        else:
            assert isinstance(said, bytes)  # a full disk is waited for
        await client.done("optim_step", step(model, 3 if where == "call" else 2))

    talk(tmp_path, client, runs=runs)


def test_a_step_that_was_begun_is_never_given_up(tmp_path: Path) -> None:
    """Its batch may be sealed: whoever goes on without it would never step again."""
    runs = MemoryRuns()

    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        await client.done("forward_backward", training(model, 1))
        runs.faults = [("step", UnavailableError("away"))] * 8
        await client.done("optim_step", step(model, 2))

    (run,) = talk(tmp_path, client, runs=runs, stall_timeout_s=0.05).all.values()
    assert len(run.history) == 1


def test_a_run_that_found_no_place_does_not_end_the_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "EXPIRY_S", 0.01)

    async def client(client: TinkerClient) -> None:
        first = await client.session()
        model = await client.model(first)
        body = {"model_id": model, "seq_id": 1, "path": "short", "ttl_seconds": 0.01}
        await client.done("save_weights", body)
        await client.post("unload_model", {"model_id": model})
        await client.model(await client.session())
        status, said = await client.ask("POST", "get_info", {"model_id": model})
        assert status == 400 and "places" in said["error"]
        await asyncio.sleep(0.2)  # looks of the door at what is expired
        assert (await client.ask("GET", "healthz"))[0] == 200

    talk(tmp_path, client, runs=MemoryRuns(places=1))


def test_weights_whose_time_is_over_are_neither_listed_nor_loaded_and_their_name_is_free(
    tmp_path: Path,
) -> None:
    async def client(client: TinkerClient) -> None:
        model = await client.model(session := await client.session())
        body = {"model_id": model, "path": "short"}
        path = (await client.done("save_weights", body | {"seq_id": 1, "ttl_seconds": 1e-6}))["path"]
        assert (await client.ask("GET", "checkpoints"))[1]["checkpoints"] == []
        assert "is not here" in await client.refused(
            "load_weights", {"model_id": model, "seq_id": 2, "path": path}
        )
        new = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        assert (await client.ask("POST", "create_sampling_session", new))[0] == 400
        await client.done("optim_step", step(model, 3))
        assert (await client.done("save_weights", body | {"seq_id": 4}))["path"] == path

    talk(tmp_path, client)


def test_who_ends_gives_its_place_back_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "TICK_S", 600.0)

    async def client(client: TinkerClient) -> None:
        first = await client.session()
        await client.model(first)
        await client.post(f"sessions/{first}/finish", {"reason": {"type": "success"}})
        await client.model(await client.session())

    talk(tmp_path, client, runs=MemoryRuns(places=1))


def test_a_model_that_is_refused_is_no_run_and_is_not_listed(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        model = await client.model(session := await client.session())
        saving = {"model_id": model, "seq_id": 1, "path": "sampled"}
        path = (await client.done("save_weights_for_sampler", saving))["path"]
        new = {"session_id": session, "model_seq_id": 1, "path": path}
        assert "can only be sampled from" in await client.refused("load_weights", new)
        other = {"session_id": session, "model_seq_id": 2, "base_model": BASE}
        assert "places" in await client.refused("create_model", other)
        listed = (await client.ask("GET", "training_runs"))[1]["training_runs"]
        assert [one["training_run_id"] for one in listed] == list(client.runs.all) == [f"probe-{session}-0"]

    talk(tmp_path, client, runs=MemoryRuns(places=1))


def test_a_time_to_live_that_no_calendar_has_is_refused(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        body = {"model_id": model, "seq_id": 1, "path": "long", "ttl_seconds": 1e300}
        assert "ttl_seconds" in await client.refused("save_weights", body)
        assert (await client.ask("GET", "checkpoints"))[0] == 200

    talk(tmp_path, client)


def test_arrays_of_two_dimensions_are_refused_by_name() -> None:
    wide = datum(weights=[[1, 0], [1, 0], [1, 0]])
    said = pb.ForwardBackwardRequest.FromString(training("m", 1, wide))
    with pytest.raises(ContractError, match=r"datum 0: weights has shape \[3, 2\]; give one number for each"):
        wire.training_call(said)
    sparse = datum()
    tensor = sparse.loss_fn_inputs["weights"]
    tensor.dtype = pb.DTYPE_FLOAT32
    tensor.shape.extend([1, 1 << 27])  # few bytes that say half a GiB
    tensor.sparse_csr.crow_indices = np.zeros(2, "<i8").tobytes()
    with pytest.raises(ContractError, match="weights"):
        wire.training_call(pb.ForwardBackwardRequest.FromString(training("m", 1, sparse)))


def test_what_is_not_served_takes_bounded_memory_and_large_bodies_are_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "BODY_BYTES", 1000)

    async def client(client: TinkerClient) -> None:
        for number in range(server_module.MOST_UNSERVED + 10):
            await client.ask("GET", f"/nowhere/{number}")
        assert len((await client.ask("GET", "/antiphon/stats"))[1]["unserved"]) == server_module.MOST_UNSERVED
        status, said = await client.ask("POST", "create_session", {"user_metadata": {"a": "x" * 2000}})
        assert status == 413 and "1000 bytes" in said["error"]

    talk(tmp_path, client)


def test_answers_that_nobody_asks_for_are_not_held_in_memory(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        call = await client.post("forward_backward", training(model, 1))
        await client.result(await client.post("optim_step", step(model, 2)))
        futures = [one for one in gc.get_objects() if isinstance(one, futures_module.Future)]
        kept = [getattr(one, name) for one in futures for name in futures_module.Future.__slots__]
        assert len(futures) >= 3 and not any(isinstance(one, bytes) for one in kept)
        assert await client.result(call)

    talk(tmp_path, client)


def test_a_base_model_that_found_no_place_is_sampled_once_there_is_one(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        await client.done("optim_step", step(model, 1))
        new = {"session_id": await client.session(), "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = (await client.post("create_sampling_session", new))["sampling_session_id"]
        assert "places" in await client.refused("asample", sampling(sampler, 0))
        await client.post("unload_model", {"model_id": model})
        await client.done("asample", sampling(sampler, 1))

    runs = talk(tmp_path, client, runs=MemoryRuns(places=1))
    (asked,) = [one for run in runs.all.values() for one in run.requests.values()]
    assert asked.version == 0


@pytest.mark.parametrize("place", ["\u00b2", "1" * 5000, "-1"])
def test_a_sequence_with_a_place_that_is_no_number_is_not_here(tmp_path: Path, place: str) -> None:
    async def client(client: TinkerClient) -> None:
        sampler = await client.sampler(await client.model(await client.session()), 1)
        future = await client.post("asample", sampling(sampler, 0))
        await client.result(future)
        assert (await client.ask("GET", f"/antiphon/sequences/{future['request_id']}/{place}"))[0] == 404

    talk(tmp_path, client)


def test_more_probable_tokens_than_an_answer_holds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MOST_CELLS", 50)

    async def client(client: TinkerClient) -> None:
        sampler = await client.sampler(await client.model(await client.session()), 1)
        await client.done("asample", sampling(sampler, 0, topk_prompt_logprobs=10))
        said = await client.refused("asample", sampling(sampler, 1, topk_prompt_logprobs=20))
        assert "topk_prompt_logprobs" in said
        more = {"num_samples": 9, "topk_sample_logprobs": 10}
        assert "topk_sample_logprobs" in await client.refused("asample", sampling(sampler, 2, **more))

    talk(tmp_path, client)


def test_a_call_whose_forgetting_the_full_disk_lost_can_be_asked_again(tmp_path: Path) -> None:
    async def asked() -> None:
        async with open_journal(tmp_path / "journal.sqlite") as journal:
            await journal.write(kept.begin("s:0", "s", 0, "asample", b"{}"))
            await journal.write(kept.answer("s:0", "json", b"old"))
            await journal.write(kept.begin("s:0", "s", 0, "asample", b"{}"))
            (row,) = journal.rows()
            assert row.form is None

    asyncio.run(asked())


def test_a_row_that_cannot_be_written_does_not_stop_the_journal(tmp_path: Path) -> None:
    async def asked() -> None:
        async with open_journal(tmp_path / "journal.sqlite") as journal:
            with pytest.raises(UnavailableError):
                await journal.write(kept.stepping("s:0", 1 << 70))
            async with asyncio.timeout(50):
                await journal.write(kept.stepping("s:0", 1))

    asyncio.run(asked())
