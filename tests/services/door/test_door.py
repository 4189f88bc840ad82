"""The door over HTTP: order, repetition, restarts, keys, samples, checkpoints, silence."""

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.client_records import SavedWeights
from antiphon.core.config import build_config
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError, ContractError, IntegrityError, UnavailableError
from antiphon.core.trust.access_tokens import ANY_RUN, Scope, TokenClaims
from antiphon.lineage.door_keys import BARRED, KEY
from antiphon.net.security.access_tokens import make_token, new_token_id
from antiphon.net.security.guard import Guard
from antiphon.net.security.keys import signing_key
from antiphon.net.security.local_run import ensure_local_credentials, local_bundle
from antiphon.protos import tinker_pb2 as pb
from antiphon.services.door import door as door_module
from antiphon.services.door import futures as futures_module
from antiphon.services.door.server import serve_door
from antiphon.services.door.wire import sdk_warning
from antiphon.system.clock import wall_clock
from tests.support.client_runs import ROOM, VOCABULARY, MemoryRuns
from tests.support.tinker_client import (
    BASE,
    TinkerClient,
    datum,
    home_guard,
    sampling,
    served,
    step,
    training,
)

Talk = Callable[[TinkerClient], Coroutine[Any, Any, Any]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "TICK_S", 0.02)
    monkeypatch.setattr(door_module, "RETRY_S", 0.02)
    monkeypatch.setattr(futures_module, "RETRY_S", 0.02)


def talk(home: Path, *talks: Talk, runs: MemoryRuns | None = None, **door: Any) -> MemoryRuns:
    """Have clients talk to a door, which is started again for each of `talks`."""

    async def all_of_it() -> MemoryRuns:
        kept = runs or MemoryRuns()
        for one in talks:
            async with asyncio.timeout(60), served(home, kept, **door) as client:
                await one(client)
        return kept

    return asyncio.run(all_of_it())


def sampled(said: bytes) -> pb.SampleResponse:
    return pb.SampleResponse.FromString(said)


def tokens(said: bytes) -> list[list[int]]:
    return [np.frombuffer(one.tokens, "<i4").tolist() for one in sampled(said).sequences]


# Order and repetition.


def test_calls_are_done_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        bodies = {n: training(model, n, datum(weights=[n, n, n])) for n in (1, 2, 3)}
        late = [await client.post("optim_step", step(model, 4))]
        late += [await client.post("forward_backward", bodies[n]) for n in (2, 3)]
        assert not client.runs.all["probe-" + model.replace(":train:", "-")].history
        first = await client.post("forward_backward", bodies[1])
        for future in (*late, first):
            await client.result(future)

    (run,) = talk(tmp_path, client).all.values()
    ((calls, adam),) = run.history
    assert [data[0][2]["weights"][0] for _, _, data in calls] == [1.0, 2.0, 3.0]
    assert adam.learning_rate == 1e-4 and run.info.run_id.startswith("probe-")


def test_the_same_call_twice_is_one_call_and_another_under_its_number_is_refused(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        session = await client.session()
        model = await client.model(session)
        assert await client.model(session) == model
        body = training(model, 1)
        one, two = [await client.post("forward_backward", body) for _ in range(2)]
        assert one == two and await client.result(one) == await client.result(two)
        assert "two clients" in await client.refused("forward_backward", training(model, 1, loss="ppo"))
        assert "two clients" in await client.refused("optim_step", step(model, 1))
        for _ in range(2):
            await client.done("optim_step", step(model, 2))
        sampler = await client.sampler(model, 3)
        first = await client.post("asample", sampling(sampler, 0))
        assert first == await client.post("asample", sampling(sampler, 0))
        assert "another call" in await client.refused("asample", sampling(sampler, 0, prompt=[9]))

    (run,) = talk(tmp_path, client).all.values()
    assert len(run.history) == 1 and run.done == ["cross_entropy"]


def test_a_call_that_cannot_be_adds_nothing_and_the_next_one_goes_on(tmp_path: Path) -> None:
    image = datum(weights=[1, 1, 1])
    image.model_input[0].image.format = "png"
    short = datum(weights=[1, 1])
    flat = datum(weights=[1, 1, 1])
    flat.loss_fn_inputs["weights"].shape[0] = 7
    bad = {
        "3 tokens, but weights of shape (2,)": [short],
        "weights of datum 1 is nan": [datum(weights=[1, 1, 1]), datum(weights=[1, float("nan"), 1])],
        "token 100 at position 1": [datum(tokens=[1, VOCABULARY, 3], weights=[1, 1, 1])],
        "target 100 at position 1": [datum(targets=[1, VOCABULARY, 1], weights=[0, 1, 0])],
        "no encoded_text": [image],
        "65 tokens; give 1 to 64": [datum(tokens=[1] * 65, targets=[1] * 65, weights=[1] * 65)],
        "no target_tokens": [pb.Datum(model_input=datum().model_input)],
        "input 'reward'": [datum(weights=[1, 1, 1], reward=[1, 1, 1])],
        "weights cannot be read": [flat],
    }

    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        for number, (words, data) in enumerate(bad.items(), 1):
            assert words in await client.refused("forward_backward", training(model, number, *data))
        number = len(bad) + 1
        said = await client.refused("forward_backward", training(model, number, loss="grpo"))
        assert "no loss 'grpo'; give one of cross_entropy" in said
        said = await client.refused("forward_backward", training(model, number + 1, loss="stable_reinforce"))
        assert "loss_fn=importance_sampling" in said
        said = await client.refused("optim_step", step(model, number + 2, beta1=1.5))
        assert said.startswith("adam_params.beta1")
        loose = datum(targets=[0, VOCABULARY + 5, 7], weights=[1, 0, 1])  # no weight: any target
        out = await client.done("forward_backward", training(model, number + 3, loose))
        record = pb.ForwardBackwardOutput.FromString(out)
        field = record.loss_fn_outputs[0].fields["logprobs"]
        assert np.frombuffer(field.data, "<f4").size == 3 and record.metrics["loss:sum"] == -112.0
        await client.done("optim_step", step(model, number + 4))

    (run,) = talk(tmp_path, client).all.values()
    ((calls, _),) = run.history
    assert len(calls) == 1 and run.done == ["cross_entropy"]


def test_a_loss_that_is_no_number_is_the_users_and_a_dead_service_is_waited_for(tmp_path: Path) -> None:
    runs = MemoryRuns()
    runs.faults = [("call", IntegrityError("the loss is no number")), ("call", UnavailableError("away"))]

    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        assert "no number" in await client.refused("forward_backward", training(model, 1))
        await client.done("forward_backward", training(model, 2))
        assert (await client.done("optim_step", step(model, 3)))["metrics"] == {"grad_norm": 1.0}

    talk(tmp_path, client, runs=runs)


def test_calls_wait_for_another_step_unless_theirs_was_skipped(tmp_path: Path) -> None:
    runs = MemoryRuns()
    runs.faults = [("adam", ContractError("eps=0 cannot be"))]

    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        numbers = iter(range(1, 99))

        async def call() -> None:
            await client.done("forward_backward", training(model, next(numbers)))

        async def stepped() -> float:
            said = await client.done("optim_step", step(model, next(numbers)))
            return float(said["metrics"]["grad_norm"])

        await call()
        assert "eps=0" in await client.refused("optim_step", step(model, next(numbers)))
        await call()
        assert await stepped() == 2.0
        await call()
        runs.faults = [("step", IntegrityError("step 1 was not made"))]
        assert "step 1 was" in await client.refused("optim_step", step(model, next(numbers)))
        await call()
        assert await stepped() == 1.0
        saved = await client.done(
            "save_weights", {"model_id": model, "path": "a", "seq_id": next(numbers), "type": "save_weights"}
        )
        await call()
        order = {"model_id": model, "path": saved["path"], "optimizer": True, "type": "load_weights"}
        runs.faults = [("load", IntegrityError("step 3 was not made"))]
        assert "step 3 was" in await client.refused("load_weights", {**order, "seq_id": next(numbers)})
        await call()
        assert await stepped() == 1.0

    talk(tmp_path, client, runs=runs)
    assert not runs.faults


def test_forward_only_calls_take_no_place(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        await client.done("forward_backward", training(model, 1, forward_only=True))
        await client.done("forward_backward", training(model, 2))
        await client.done("optim_step", step(model, 3))

    (run,) = talk(tmp_path, client).all.values()
    assert len(run.history[0][0]) == 1 and len(run.done) == 2


# Restarts.


@settings(max_examples=25, deadline=None, print_blob=True)
@given(
    cuts=st.lists(st.sampled_from(["call", "step", "save", "sample"]), max_size=4),
    twice=st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_a_door_killed_anywhere_ends_as_one_that_was_not(
    cuts: list[str], twice: list[bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The client asks anew for whatever it has not heard, and never hears of what happened."""

    def loop(kills: list[str]) -> tuple[Any, Any]:
        home, runs = tmp_path_factory.mktemp("home"), MemoryRuns()
        names: dict[str, str] = {}
        answers: dict[int, Any] = {}

        async def begin(client: TinkerClient) -> None:
            names["session"] = await client.session()
            names["model"] = await client.model(names["session"])

        async def go_on(client: TinkerClient) -> None:
            model = names["model"]
            sampler = f"{names['session']}:sample:0"
            todo: list[tuple[str, Any]] = [
                ("forward_backward", training(model, 1, datum(weights=[1, 0, 1]))),
                ("forward_backward", training(model, 2, datum(weights=[2, 0, 1]))),
                ("optim_step", step(model, 3)),
                ("forward_backward", training(model, 4, datum(weights=[3, 0, 1]))),
                ("save_weights_for_sampler", {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 0}),
                ("asample", sampling(sampler, 0, num_samples=2, params={"seed": 3})),
                ("optim_step", step(model, 6)),
                ("save_weights", {"model_id": model, "seq_id": 7, "path": "end"}),
                ("asample", sampling(sampler, 1, params={"seed": 4})),
            ]
            for number, (path, body) in enumerate(todo):
                for _ in range(1 + twice[number]):
                    future = await client.post(path, body)
                answers[number] = await client.result(future)

        async def cut(client: TinkerClient) -> None:
            working = asyncio.create_task(go_on(client))
            while client.runs.faults and not working.done():
                await asyncio.sleep(0.002)
            working.cancel()
            await asyncio.wait([working])

        talk(home, begin, runs=runs)
        for one in kills:
            runs.faults = [(one, None)]  # the service never answers, and the door ends there
            talk(home, cut, runs=runs)
        runs.faults = []
        talk(home, go_on, runs=runs)
        (run,) = runs.all.values()
        heard = [one if isinstance(one, bytes) else one.get("metrics") for one in answers.values()]
        return run.history, heard

    assert loop(cuts) == loop([])


def test_answers_outlive_a_restart_and_are_forgotten_after_their_time(tmp_path: Path) -> None:
    heard: list[Any] = []

    async def first(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        heard.append(await client.post("forward_backward", training(model, 1)))
        heard.append(await client.result(heard[0]))

    async def second(client: TinkerClient) -> None:
        assert await client.result(heard[0]) == heard[1]

    async def third(client: TinkerClient) -> None:
        model = heard[0]["model_id"]
        # What adds up for the next step is kept; what made a step is not.
        await client.done("optim_step", step(model, 2))
        async with asyncio.timeout(50):
            while (await client.ask("POST", "retrieve_future", {"request_id": heard[0]["request_id"]}))[
                0
            ] != 410:
                await asyncio.sleep(0.01)
        assert "was done and its answer told" in await client.refused("forward_backward", training(model, 1))
        assert (await client.ask("POST", "retrieve_future", {"request_id": "never"}))[0] == 410

    runs = talk(tmp_path, first, second)
    talk(tmp_path, third, runs=runs, future_ttl_s=0.05)


def test_one_home_has_one_door(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        with pytest.raises(ConfigError, match="another door serves"):
            async with served(tmp_path, MemoryRuns()):
                pass

    talk(tmp_path, client)


# Polls.


def test_a_poll_is_held_and_then_asks_to_try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_module, "HOLD_S", 0.3)

    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        sampler = await client.sampler(model, 1)
        client.runs.holding.set()
        future = await client.post("asample", sampling(sampler, 0))
        before = asyncio.get_running_loop().time()
        said = await client.post("retrieve_future", {"request_id": future["request_id"]})
        assert asyncio.get_running_loop().time() - before > 0.25
        assert (said["type"], said["queue_state"]) == ("try_again", "active")
        assert said["queue_state_reason"] == "a worker"
        waiting = asyncio.create_task(client.result(future))
        client.runs.released.set()
        assert sampled(await waiting).sequences
        _, stats = await client.ask("GET", "/antiphon/stats")
        assert stats["polls"] >= 4 and stats["calls"]["POST /api/v1/asample"] == 1 and not stats["unserved"]

    talk(tmp_path, client)


def test_more_than_is_taken_in_waits_at_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MOST_WAITING", 3)

    async def client(client: TinkerClient) -> None:
        sampler = await client.sampler(await client.model(await client.session()), 1)
        client.runs.holding.set()
        futures = [await client.post("asample", sampling(sampler, number)) for number in range(3)]
        status, said = await client.ask("POST", "asample", sampling(sampler, 3))
        assert status == 429 and "3 requests wait" in said["error"]
        assert await client.post("asample", sampling(sampler, 2)) == futures[2]
        client.runs.released.set()
        for future in futures:
            await client.result(future)
        await client.done("asample", sampling(sampler, 3))

    talk(tmp_path, client)


# Samples.


def test_a_seed_means_the_same_tokens_and_without_one_the_session_and_number_do(tmp_path: Path) -> None:
    heard: list[Any] = []

    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        one, two = await client.sampler(model, 1, 0), await client.sampler(model, 2, 1)
        seeded = {"num_samples": 3, "params": {"seed": 7}}
        group = tokens(await client.done("asample", sampling(one, 0, **seeded)))
        assert group == tokens(await client.done("asample", sampling(two, 5, **seeded)))
        assert len({tuple(row) for row in group}) > 1
        heard.append((one, await client.done("asample", sampling(one, 1, num_samples=4))))
        other = await client.done("asample", sampling(one, 2, num_samples=4))
        assert tokens(other) != tokens(heard[0][1])

    async def again(client: TinkerClient) -> None:
        for future in client.runs.all.values():
            future.answered.clear()
        assert await client.done("asample", sampling(heard[0][0], 1, num_samples=4)) == heard[0][1]

    (run,) = talk(tmp_path, client, again).all.values()
    assert all(one.version == 0 for one in run.requests.values())


def test_what_a_sequence_is_made_of_can_be_read(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        sampler = await client.sampler(await client.model(await client.session()), 1)
        future = await client.post("asample", sampling(sampler, 0, num_samples=2, params={"seed": 1}))
        ids = future["sample_sequence_ids"]
        assert ids == [f"{future['request_id']}/{place}" for place in range(2)]
        drawn = tokens(await client.result(future))
        status, said = await client.ask("GET", f"/antiphon/sequences/{ids[1]}")
        (run,) = client.runs.all.values()
        one = run.answered[future["request_id"]][1]
        assert status == 200 and said["seed"] == one.seed
        assert said["versions"] == [{"version": 0, "start": 0, "stop": len(drawn[1])}]
        assert said["digest"] == digest_bytes(np.asarray(drawn[1], "<i4").tobytes())
        assert said["prompt_cache_hit_tokens"] == 3
        assert (await client.ask("GET", f"/antiphon/sequences/{future['request_id']}/2"))[0] == 404

    talk(tmp_path, client)


def test_logprobs_of_the_prompt_and_the_most_probable_tokens(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        sampler = await client.sampler(await client.model(await client.session()), 1)
        asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 3}
        said = sampled(await client.done("asample", sampling(sampler, 0, [5, 6, 7, 8], **asked)))
        scored = np.frombuffer(said.prompt_logprobs, "<f4")
        assert np.isnan(scored[0]) and scored[1:].tolist() == [-6.0, -7.0, -8.0]
        top = said.topk_prompt_logprobs
        assert (top.k, top.length) == (2, 4)
        ids = np.frombuffer(top.token_ids, "<i4").reshape(4, 2)
        nats = np.frombuffer(top.logprobs, "<f4").reshape(4, 2)
        assert ids.tolist() == [[0, 0], [0, 1], [0, 1], [0, 1]] and (nats[0] == -99999.0).all()
        (one,) = said.sequences
        assert one.topk_sampled_logprobs.length == len(one.tokens) // 4 and one.topk_sampled_logprobs.k == 3
        asked = {"prompt_logprobs": True, "prompt_logprobs_last_n": 2}
        said = sampled(await client.done("asample", sampling(sampler, 1, [5, 6, 7, 8], **asked)))
        assert np.isnan(np.frombuffer(said.prompt_logprobs, "<f4")).tolist() == [True, True, False, False]

    talk(tmp_path, client)


def test_samples_that_cannot_be_are_the_users_error(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        sampler = await client.sampler(await client.model(await client.session()), 1)
        image = sampling(sampler, 1)
        image["prompt"]["chunks"].append({"type": "image", "data": ""})
        bad = {
            "chunk of type image": image,
            "no tokens": sampling(sampler, 2, []),
            "beyond the vocabulary": sampling(sampler, 3, [VOCABULARY]),
            "leaves room for 61": sampling(sampler, 4, params={"max_tokens": 62}),
            "stop=[]": sampling(sampler, 5, params={"stop": []}),
            "prompt_alt_tokens_k is not served": sampling(sampler, 6, prompt_alt_tokens_k=2),
            "num_samples": sampling(sampler, 7, num_samples=0),
            "sampling_params.temperature": sampling(sampler, 8, params={"temperature": -1.0}),
        }
        for words, body in bad.items():
            assert words in await client.refused("asample", body)
        for number, stop in enumerate(([13], ["\n\nUser:"], "x"), 20):
            await client.done("asample", sampling(sampler, number, params={"stop": stop, "max_tokens": None}))

    (run,) = talk(tmp_path, client).all.values()
    asked = [one.sampling for one in run.requests.values()][-3:]
    assert [one.stop_token_ids for one in asked] == [(13,), (), ()]
    assert [one.stop for one in asked] == [(), ("\n\nUser:",), ("x",)]
    assert {one.max_tokens for one in asked} == {ROOM - 3} and {one.top_k for one in asked} == {0}


def test_a_snapshot_is_pinned_and_an_inflight_session_follows(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        pinned, following = await client.sampler(model, 1, 0), await client.sampler(model, 2, 1, "inflight")
        await client.done("forward_backward", training(model, 3))
        await client.done("optim_step", step(model, 4))
        for sampler in (pinned, following):
            await client.done("asample", sampling(sampler, 0))
        _, said = await client.ask("GET", f"samplers/{pinned}")
        assert (said["sampler_id"], said["base_model"]) == (pinned, BASE)

    (run,) = talk(tmp_path, client, max_staleness=2).all.values()
    assert [(one.version, one.max_staleness) for one in run.requests.values()] == [(0, 2), (None, 2)]


def test_weights_of_old_sampling_sessions_are_given_up(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        for number in range(4):
            await client.sampler(model, 1 + number, number)

    runs = talk(tmp_path, client, max_staleness=0)
    assert [one.name for one in runs.dropped] == ["session-0", "session-1"]
    assert sorted(one.name for one in runs.kept) == ["session-2", "session-3"]


def test_the_base_model_is_sampled_by_version_0(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        session = await client.session()
        body = {"session_id": session, "sampling_session_seq_id": 9, "base_model": BASE}
        alone = (await client.post("create_sampling_session", body))["sampling_session_id"]
        await client.done("asample", sampling(alone, 0))
        model = await client.model(session)
        body["sampling_session_seq_id"] = 10
        beside = (await client.post("create_sampling_session", body))["sampling_session_id"]
        await client.done("asample", sampling(beside, 0))
        status, said = await client.ask("POST", "create_sampling_session", body | {"base_model": "other"})
        assert status == 400 and BASE in said["error"] and model

    runs = talk(tmp_path, client)
    base, trained = runs.all.values()
    assert base.info.run_id.startswith("probe-base-") and base.info.rank == 0
    assert [one.version for run in (base, trained) for one in run.requests.values()] == [0, 0]


# Our loss on recorded log-probabilities.


def test_spans_are_joined_to_what_was_recorded(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        sampler = await client.sampler(model, 1)
        future = await client.post("asample", sampling(sampler, 0, params={"seed": 3, "max_tokens": 8}))
        (drawn,) = tokens(await client.result(future))
        await client.done("forward_backward", training(model, 2))
        await client.done("optim_step", step(model, 3))
        row = [1, 2, 3, *drawn]
        zeros = [0.0] * (len(row) - 1)
        one = datum(row[:-1], row[1:], logprobs=zeros, advantages=[0.0, 0.0] + [1.0] * len(drawn))
        one.loss_fn_input_spans.add().prompt_tokens.length = 2
        span = one.loss_fn_input_spans.add().sampled_tokens
        span.sequence_id, span.length = future["sample_sequence_ids"][0], len(drawn)
        await client.done("forward_backward", training(model, 4, one, loss="stable_reinforce"))
        await client.done("optim_step", step(model, 5))
        span.sequence_id = "elsewhere/0"
        said = await client.refused("forward_backward", training(model, 6, one, loss="stable_reinforce"))
        assert "was not sampled from this model" in said
        span.length = 0
        said = await client.refused("forward_backward", training(model, 7, one, loss="stable_reinforce"))
        assert "position 2 has an advantage, but no span" in said

    (run,) = talk(tmp_path, client, stable_reinforce="ours").all.values()
    ((_, _, inputs),) = run.history[1][0][0][2]
    (recorded,) = next(iter(run.answered.values()))
    count = recorded.token_ids.size
    assert inputs["logprobs"] == [0.0, 0.0, *recorded.logprobs.tolist()]
    assert inputs["staleness"] == [0.0, 0.0] + [1.0] * count  # sampled by version 0, trained at version 1


# Checkpoints.


def test_weights_are_saved_listed_loaded_and_dropped(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        session = await client.session()
        model = await client.model(session, lora_config={"rank": 8, "train_unembed": False})
        body = {"model_id": model, "seq_id": 1, "path": "first", "ttl_seconds": 1e9}
        path = (await client.done("save_weights", body))["path"]
        run_id = f"probe-{session}-0"
        assert path == f"tinker://{run_id}/weights/first"
        await client.done("forward_backward", training(model, 2))
        await client.done("optim_step", step(model, 3))
        assert "there already" in await client.refused("save_weights", body | {"seq_id": 4})
        await client.done("save_weights", body | {"seq_id": 5, "overwrite": True})
        assert "names weights" in await client.refused(
            "save_weights", {"model_id": model, "seq_id": 6, "path": "session-1"}
        )
        assert (await client.refused("save_weights", {"model_id": model, "seq_id": 7, "path": "../x"}))[
            :4
        ] == "path"
        named = await client.done("save_weights_for_sampler", {"model_id": model, "seq_id": 8, "path": "s"})
        assert named["path"] == f"tinker://{run_id}/sampler_weights/s"
        await client.sampler(model, 9)
        _, listed = await client.ask("GET", f"training_runs/{model}/checkpoints")
        ids = [one["checkpoint_id"] for one in listed["checkpoints"]]
        assert ids == ["weights/first", "sampler_weights/s"] and listed["cursor"]["total_count"] == 2
        assert (await client.ask("GET", f"training_runs/{run_id}"))[1]["lora_rank"] == 8
        info = await client.post("weights_info", {"tinker_path": path})
        assert (info["lora_rank"], info["train_unembed"], info["train_mlp"]) == (8, False, True)
        loaded = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
        said = await client.done("load_weights", loaded)
        assert said["model_id"] == f"{session}:train:1" and said["path"] == path
        assert (await client.post("get_info", {"model_id": said["model_id"]}))["lora_rank"] == 8
        await client.done("load_weights", {"model_id": model, "seq_id": 10, "path": path, "optimizer": False})
        body = {"session_id": session, "sampling_session_seq_id": 5, "model_path": named["path"]}
        sampler = (await client.post("create_sampling_session", body))["sampling_session_id"]
        assert (await client.ask("GET", f"samplers/{sampler}"))[1]["model_path"] == named["path"]
        await client.done("asample", sampling(sampler, 0))
        assert (await client.ask("DELETE", f"training_runs/{run_id}/checkpoints/weights/first"))[0] == 200
        assert (await client.ask("POST", "weights_info", {"tinker_path": path}))[0] == 400
        said = await client.refused("load_weights", loaded | {"model_seq_id": 2})
        assert "is not here" in said

    runs = talk(tmp_path, client)
    first, second = runs.all.values()
    saved = SavedWeights(first.info.run_id, "weights", "first")
    assert first.history[1] == (saved, False) and second.history == [(saved, True)]
    assert second.order.rank == 8 and second.order.targets == ("attn", "mlp")


def test_a_full_disk_at_a_save_is_waited_for(tmp_path: Path) -> None:
    runs = MemoryRuns()
    runs.faults = [("save", UnavailableError("no space is left"))]

    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session())
        await client.done("save_weights", {"model_id": model, "seq_id": 1, "path": "end"})

    talk(tmp_path, client, runs=runs)


# Models and sessions.


def test_models_that_cannot_be_are_the_users_error(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        session = await client.session()
        new = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
        assert BASE in await client.refused("create_model", new | {"base_model": "Qwen/other"})
        said = await client.refused("create_model", new | {"optimizer_config": {"type": "muon"}})
        assert "use adamw" in said
        large = new | {"lora_config": {"rank": 65}}
        assert "most_rank" in await client.refused("create_model", large)
        assert (await client.ask("POST", "create_model", new | {"session_id": "x"}))[0] == 404
        assert (await client.ask("POST", "optim_step", step("x:train:0", 1)))[0] == 404
        await client.model(session, 1)
        places = await client.refused("create_model", new | {"model_seq_id": 2})
        assert "places for models are taken" in places
        _, said = await client.ask("GET", "get_server_capabilities")
        assert [one["model_name"] for one in said["supported_models"]] == [BASE, "tiny"]

    talk(tmp_path, client, runs=MemoryRuns(places=1))


def test_full_weights_are_trained_where_the_configuration_says_so(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        model = await client.model(await client.session(), lora_config={"rank": 8})
        said = await client.post("get_info", {"model_id": model})
        assert said["is_lora"] is False and "lora_rank" not in said
        assert said["model_data"] == {"arch": "tiny", "model_name": BASE, "tokenizer_id": "tokenizer"}

    talk(tmp_path, client, weights="full")


def test_a_silent_session_gives_its_places_back_and_goes_on_when_it_is_heard(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        session = await client.session()
        model = await client.model(session)
        await client.done("forward_backward", training(model, 1))
        async with asyncio.timeout(50):
            while client.runs.up:
                await asyncio.sleep(0.01)
        await client.post("session_heartbeat", {"session_id": session})
        assert not client.runs.up
        before = client.runs.opened
        await client.done("optim_step", step(model, 2))
        assert client.runs.opened > before  # on a busy machine it is silent again by now
        await client.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
        async with asyncio.timeout(50):
            while client.runs.up:
                await asyncio.sleep(0.01)
        assert (await client.ask("POST", "session_heartbeat", {"session_id": session}))[0] == 410
        assert (await client.ask("POST", "session_heartbeat", {"session_id": "x"}))[0] == 410
        assert (await client.ask("GET", "sessions"))[1] == {"sessions": [session]}

    (run,) = talk(tmp_path, client, session_timeout_s=0.2).all.values()
    assert len(run.history) == 1


@pytest.mark.parametrize(
    ("version", "known"), [("0.24.9", False), ("0.25.0", True), ("0.38.1", True), ("1.0", False)]
)
def test_versions_of_the_sdk_that_were_not_tried_are_said(tmp_path: Path, version: str, known: bool) -> None:
    async def client(client: TinkerClient) -> None:
        said = await client.post("create_session", {"sdk_version": version})
        assert said.get("warning_message", "") == sdk_warning(version)
        assert ("warning_message" in said) != known

    talk(tmp_path, client)


def test_what_is_not_served_is_answered_in_words_and_counted(tmp_path: Path) -> None:
    async def client(client: TinkerClient) -> None:
        status, said = await client.ask("POST", "billing/usage", {})
        assert status == 404 and "POST /api/v1/billing/usage is not served here" in said["error"]
        session = await client.session()
        model = await client.model(session)
        assert "not served" in await client.refused(
            "save_weights_external", {"model_id": model, "seq_id": 1, "path": "x"}
        )
        await client.done("optim_step", step(model, 2))
        for path, body in (("client/config", {}), ("telemetry", {}), ("client/dynamic_config", {})):
            assert (await client.ask("POST", path, body))[0] == 200
        assert (await client.ask("GET", "healthz"))[0] == 200
        assert (await client.ask("POST", "create_model", "no object"))[0] == 200
        _, stats = await client.ask("GET", "/antiphon/stats")
        assert stats["unserved"] == {"POST /api/v1/billing/usage": 1} and stats["cpu_s"] > 0.0
        assert await client.post("unload_model", {"model_id": model}) and not client.runs.up

    talk(tmp_path, client)


# Keys.


def test_only_keys_of_the_door_are_let_in(tmp_path: Path) -> None:
    signer, now = signing_key(bytes(32)), datetime.now(UTC).timestamp()
    guard = Guard(signer.public, ANY_RUN, wall_clock, wall_clock)

    def key(name: str = "ada", scope: Scope = Scope.DOOR, hours: float = 1.0, by: Any = signer) -> str:
        claims = TokenClaims(new_token_id(), ANY_RUN, name, (scope,), int(now + hours * 3600), 1)
        return f"tml-{make_token(claims, by)}"

    async def client(client: TinkerClient) -> None:
        async def asked(shown: str) -> tuple[int, str]:
            status, said = await client.ask("GET", "sessions", key=shown)
            return status, said.get("error", "")

        assert await asked(client.key) == (200, "")
        assert await asked(key()) == (200, "")
        refused = {
            "begins with tml-": key().removeprefix("tml-"),
            "scope door": key(scope=Scope.SAMPLE),
            "expired": key(hours=-1.0),
            "signature": key(by=signing_key(bytes([1]) * 32)),
            "invite NAME --scopes door": "tml-x",
        }
        for words, shown in refused.items():
            status, said = await asked(shown)
            assert status == (403 if words == "scope door" else 401) and words in said, said
        (tmp_path / BARRED).write_text("bob\n")
        assert (await asked(key("bob")))[0] == 403 and (await asked(key("ada")))[0] == 200
        session = await client.session()
        status, said = await client.ask("GET", f"sessions/{session}", key=key())
        assert status == 404 and "of yours" in said["error"]

    talk(tmp_path, client, guard=guard)


def test_an_address_beyond_loopback_needs_certificates(tmp_path: Path) -> None:
    async def never(client: TinkerClient) -> None:
        raise AssertionError("it was served")

    with pytest.raises(ConfigError, match=r"door.address=0.0.0.0 would serve without encryption"):
        talk(tmp_path, never, address="0.0.0.0")


def test_elsewhere_than_on_loopback_it_is_encrypted(tmp_path: Path) -> None:
    ensure_local_credentials(tmp_path)
    bundle = local_bundle(tmp_path)
    services = {"credentials": str(bundle), "address": "localhost"}
    config = build_config({"door": {"address": "0.0.0.0"}, "services": services})

    async def ask() -> None:
        async with (
            serve_door(config, "probe", MemoryRuns(), tmp_path, home_guard(tmp_path)) as url,
            aiohttp.ClientSession() as http,
        ):
            assert url.startswith("https://localhost:")
            trusting = ssl.create_default_context(cafile=bundle / "ca.pem")
            key = {"X-API-Key": (tmp_path / KEY).read_text().strip()}
            async with http.get(f"{url}/api/v1/healthz", headers=key, ssl=trusting) as reply:
                assert await reply.json() == {"status": "ok"}
            assert (tmp_path / KEY).stat().st_mode & 0o077 == 0

    asyncio.run(ask())
