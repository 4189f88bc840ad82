"""What clients ask for is refused in words where it cannot be, and workers go where the oldest request is."""

import math
from typing import Any

import pytest

from antiphon.core.config import build_config
from antiphon.core.coordinator import client_groups
from antiphon.core.coordinator.overview import stage_reply, status_of
from antiphon.core.errors import ConfigError, ContractError
from antiphon.core.loop import events as e
from antiphon.core.loop.client_groups import KEPT_STEPS, OtherWorker, version_wanted
from antiphon.core.records import SamplingParameters
from tests.support.client_model import ClientModel, asking, client_config
from tests.support.loop_model import make_config


def model_at(version: int, names: tuple[str, ...] = ("a",)) -> ClientModel:
    model = ClientModel(client_config(), names)
    for _ in range(version + 1):
        model.make_version()
    return model


def sampled_as(**changes: Any) -> dict[str, Any]:
    return {"sampling": SamplingParameters(**{"max_tokens": 6, **changes})}


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("a b", {}, r"request_id='a b' needs 1 to 128 of"),
        ("", {}, "request_id='' needs"),
        ("x" * 129, {}, "needs 1 to 128"),
        ("r", {"samples": 0}, "seeds is empty"),
        ("r", {"samples": 100_000}, "100000 completions of 6 tokens are more than one message of 63 MiB"),
        (
            "r",
            sampled_as(max_tokens=62),
            r"3 prompt tokens and max_tokens=62 exceed rollout.max_model_tokens=64",
        ),
        ("r", sampled_as(max_tokens=0), "leaves nothing to sample"),
        ("r", sampled_as(stop_token_ids=(50,)), "token id 50 is not in the vocabulary of 50"),
        ("r", sampled_as(stop_token_ids=(-1,)), "token id -1"),
        ("r", sampled_as(stop_token_ids=tuple(range(50)) * 2), "more than 64 stop sequences"),
        ("r", sampled_as(stop=("",)), "stop has a text of no character"),
        ("r", sampled_as(stop=("end",)), "as texts cannot be looked for here"),
        ("r", sampled_as(temperature=math.nan), "temperature=nan is not in 0..10"),
        ("r", sampled_as(top_p=0.0), "top_p=0.0 is no share"),
        ("r", sampled_as(top_k=-1), "top_k=-1 is negative"),
        ("r", {"max_staleness": -1}, "max_staleness=-1 is negative"),
        ("r", {"version": 3}, "version 3 was never announced; versions up to 2 are"),
    ],
)
def test_a_request_that_cannot_be_is_refused_and_leaves_nothing(
    name: str, fields: dict[str, Any], words: str
) -> None:
    model = model_at(2)
    before = len(model.events)
    with pytest.raises(ContractError, match=words):
        model.ask(asking(name, **fields))
    assert len(model.events) == before


def test_tokens_and_seeds_of_a_request_are_looked_at() -> None:
    model, good = model_at(0), asking("r")
    for field, value, words in (
        ("prompt_token_ids", (), "prompt_token_ids is empty"),
        ("prompt_token_ids", (1, 50), "token id 50"),
        ("seeds", (1 << 64,), r"a seed is not in 0\.\.2\*\*64 - 1"),
    ):
        changed = {name: getattr(good, name) for name in ("request_id", "sampling", "version")}
        given = {"prompt_token_ids": good.prompt_token_ids, "seeds": good.seeds, **changed, field: value}
        with pytest.raises(ContractError, match=words):
            model.ask(type(good)(**given))


def test_only_a_run_of_a_client_takes_requests_and_steps() -> None:
    model = ClientModel(make_config())
    with pytest.raises(ContractError, match=r"environment\.name=client, which `antiphon door` starts"):
        model.ask(asking("r"))
    with pytest.raises(ContractError, match="has prompts of its own"):
        client_groups.check_step(model.loop, 0, "a" * 64)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"loop": {"mode": "fixed"}}, "loop.mode cannot act so with environment.name=client"),
        (
            {"rollout": {"logprobs": "learner"}, "loop": {"max_staleness": 0}, "trust": {"audits": "off"}},
            "rollout.logprobs cannot act so with environment.name=client",
        ),
        ({"loop": {"publish_interval": 2}}, "loop.publish_interval cannot act so"),
        ({"reference": {"kl": 0.1}}, "reference cannot act so"),
        (
            {"rollout": {"logprobs": "learner"}, "loop": {"max_staleness": 0}, "trust": {"audits": "off"}},
            "rollout.logprobs cannot act so",
        ),
    ],
)
def test_what_only_prompts_of_the_run_s_own_have_is_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_config({"environment": {"name": "client"}, **section})


@pytest.mark.parametrize(
    ("versions", "held", "asked", "others", "expected"),
    [
        # (version asked for, or None with the oldest that may sample it), of the oldest request first
        ([], 2, None, [], (None, False)),
        ([2], 2, None, [], (2, False)),
        ([1], 2, None, [], (1, True)),
        ([1, 2], 2, None, [], (1, True)),  # the oldest first
        ([1, 2], 2, None, [OtherWorker(1, None, False)], (2, False)),  # another one serves it
        ([1], 2, None, [OtherWorker(1, None, True)], (None, False)),
        ([1], 2, None, [OtherWorker(1, None, False)], (1, True)),  # it has no room: help
        ([1, 2], 2, None, [OtherWorker(3, 1, False)], (2, False)),  # another one is about to load it
        ([1, 2], 2, 1, [OtherWorker(3, 1, False)], (1, True)),  # both are: neither leaves it to the other
        ([None], 2, None, [], (None, False)),
        ([None], 1, None, [], (None, True)),  # too old for it
        ([None, 1], 1, None, [OtherWorker(2, None, True)], (1, False)),
        ([3], None, None, [], (3, True)),
    ],
)
def test_a_worker_goes_where_the_oldest_request_is_that_no_other_serves(
    versions: list[int | None],
    held: int | None,
    asked: int | None,
    others: list[OtherWorker],
    expected: tuple[int | None, bool],
) -> None:
    model = model_at(2)
    if 3 in versions:
        model.make_version()
    for index, version in enumerate(versions):
        model.ask(asking(f"r{index}", version))
    assert version_wanted(model.loop.run, model.config, held, asked, others) == expected


@pytest.mark.parametrize(("stream", "late"), [(1, 0), (0, None), (None, 0), (0, 1)])
def test_a_stream_of_requests_puts_no_other_off(stream: int | None, late: int | None) -> None:
    model = model_at(2)
    worker = model.workers[0]
    begun: dict[str, int] = {}
    for number in range(60):
        model.ask(asking(f"r{number}", stream))
        if number == 20:
            model.ask(asking("late", late))
        model.beat(worker)
        model.load(worker)
        model.lease(worker)
        for lease_id in list(worker.leases):  # each takes two rounds, so that it is never idle by itself
            if begun.setdefault(lease_id, number) < number:
                model.submit(worker, lease_id)
    assert "c-late" in model.loop.run.sampled
    assert len(model.loop.run.sampled) > 40


def test_two_workers_serve_two_versions_side_by_side() -> None:
    model = model_at(2, ("a", "b"))
    for number in range(40):
        for version in (0, 1):
            model.ask(asking(f"r{number}-{version}", version))
        for worker in model.workers:
            for lease_id in list(worker.leases):
                model.submit(worker, lease_id)
            model.beat(worker)
            model.load(worker)
            model.lease(worker)
    loads = [event for event in model.events if isinstance(event, e.WorkerLoaded)]
    assert len(loads) < 12  # they do not change places all the time
    model.work_off()


def test_what_was_sampled_is_kept_for_a_while_and_for_the_newest_steps() -> None:
    model = model_at(0)
    model.ask(asking("r0"))
    model.work_off()
    assert client_groups.ended(model.loop, "r0") == "c-r0" and "c-r0" in model.payloads
    model.tick(60.0)
    assert client_groups.ended(model.loop, "r0") == "c-r0"  # of the newest steps
    for _ in range(KEPT_STEPS + 1):
        model.make_version()
    model.restart()
    model.ask(asking("r1"))
    model.work_off()
    model.tick(40.0)
    assert client_groups.ended(model.loop, "r0") == "c-r0"  # the process has known it for 40 s alone
    model.tick(20.0)
    assert "c-r0" not in model.payloads and "c-r1" in model.payloads
    with pytest.raises(ContractError, match="'r0' is not known, or its completions are kept no longer"):
        client_groups.ended(model.loop, "r0")
    model.restart()


def test_what_a_request_waits_for_is_said() -> None:
    model = model_at(0)
    model.ask(asking("r0", 0))
    assert client_groups.waits_for(model.loop, "r0") == "a worker to join: none is active"
    worker = model.workers[0]
    model.beat(worker)
    model.load(worker)
    model.beat(worker)
    model.ask(asking("r1", 0))
    assert client_groups.waits_for(model.loop, "r1") == "a worker of version 0, and 1 requests before it"
    model.lease(worker)
    assert client_groups.waits_for(model.loop, "r0") == "a-1 to sample it"
    model.work_off()
    assert status_of(model.loop, model.now, "").groups_open == 0
    assert not stage_reply(model.loop, "reward", 0).done


def test_a_sealed_step_never_changes_and_the_next_one_alone_is_taken() -> None:
    model = model_at(2)
    state = model.loop.run
    assert client_groups.check_step(model.loop, 1, state.sealed[1].digest) is state.sealed[1]
    with pytest.raises(ContractError, match="a sealed batch never changes"):
        client_groups.check_step(model.loop, 1, "f" * 64)
    with pytest.raises(ContractError, match=r"step 3 cannot be sealed: 2 of run\.steps=100 are committed"):
        client_groups.check_step(model.loop, 3, "f" * 64)
    assert client_groups.check_step(model.loop, 2, "f" * 64) is None
    assert stage_reply(model.loop, "reward", 1).batch is state.sealed[1]
