"""Whatever happens in whichever order, each request of a client gets exactly its completions, once."""

import numpy as np
from hypothesis import given, note, settings
from hypothesis import strategies as st

from antiphon.core.client_records import SampleRequest
from antiphon.core.errors import ContractError
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import CLIENT_GROUP
from antiphon.core.records import SamplingParameters
from antiphon.net.wire import CALLS
from antiphon.protos import coordinator_pb2
from tests.support.client_model import END_TOKEN, ClientModel, asking, client_config, token_at
from tests.support.fuzzing import messages

ACTS = (
    "ask",
    "ask",
    "ask",
    "lease",
    "lease",
    "load",
    "beat",
    "submit",
    "submit",
    "vanish",
    "version",
    "tick",
)
SEEDS = st.integers(0, 2**32 - 1)


def act(model: ClientModel, rng: np.random.Generator, asked: dict[str, SampleRequest], faults: bool) -> None:
    worker = model.workers[int(rng.integers(len(model.workers)))]
    what = ACTS[int(rng.integers(len(ACTS)))]
    newest = model.loop.run.newest_version or 0
    if what == "ask":
        version = int(rng.integers(newest + 1)) if rng.random() < 0.6 else None
        stops = tuple(rng.integers(0, 50, int(rng.integers(0, 3))).tolist())
        sampling = SamplingParameters(max_tokens=int(rng.integers(1, 9)), stop_token_ids=stops)
        fields = {"sampling": sampling, "max_staleness": int(rng.integers(0, 3))}
        name = f"r{len(asked)}"
        asked[name] = asking(name, version, int(rng.integers(1, 7)), **fields)
        model.ask(asked[name])
        if rng.random() < 0.3:  # again, as after an answer that was lost
            model.ask(asked[name])
    elif what == "lease":
        model.lease(worker)
    elif what == "load":
        model.load(worker)
    elif what == "beat":
        model.beat(worker, rng)
    elif what == "submit" and worker.leases and worker.held is not None and worker.worker_id:
        model.submit(worker, list(worker.leases)[int(rng.integers(len(worker.leases)))])
    elif what == "version" and newest < 6:
        model.make_version()
    elif what == "tick":
        model.tick(float(rng.choice([0.5, 5.0, 30.0])))
    elif what == "vanish" and faults and rng.random() < 0.5:
        model.vanish(worker)
    elif what == "vanish" and faults:
        model.restart()


@settings(max_examples=120)
@given(SEEDS, st.integers(1, 3), st.booleans(), st.integers(20, 200))
def test_each_request_gets_its_completions_once(seed: int, workers: int, faults: bool, acts: int) -> None:
    note(f"seed {seed}")
    rng = np.random.default_rng(seed)
    model = ClientModel(client_config(), tuple("abc"[:workers]))
    model.make_version()
    asked: dict[str, SampleRequest] = {}
    newest_at: dict[str, int] = {}
    for _ in range(acts):
        act(model, rng, asked, faults)
        newest_at |= {name: model.loop.run.newest_version or 0 for name in asked.keys() - newest_at.keys()}
    model.work_off()
    finished = [event for event in model.events if isinstance(event, e.SamplesFinished)]
    assert sorted(event.group_id for event in finished) == sorted(CLIENT_GROUP + name for name in asked)
    assert not any(event.refusal for event in finished)
    assert not [event for event in model.events if isinstance(event, e.WorkerStruck | e.GroupDropped)]
    for name, request in asked.items():
        (answer,) = model.answers[CLIENT_GROUP + name]
        assert tuple(one.seed for one in answer.trajectories) == request.seeds
        ends = {END_TOKEN, *request.sampling.stop_token_ids}
        for one in answer.trajectories:
            versions = [span.version for span in one.spans for _ in range(span.start, span.stop)]
            said = [token_at(one.seed, version, place) for place, version in enumerate(versions)]
            assert one.token_ids.tolist() == said
            assert not ends & set(said[:-1]) and (
                said[-1] in ends or len(said) == request.sampling.max_tokens
            )
            if request.version is None:
                assert min(versions) >= newest_at[name] - request.max_staleness
            else:
                assert set(versions) == {request.version}
    assert model.loop.run.requested == 0 and not model.loop.run.groups


@settings(max_examples=30)
@given(SEEDS)
def test_a_version_that_is_lost_refuses_its_requests_and_holds_up_no_other(seed: int) -> None:
    note(f"seed {seed}")
    rng = np.random.default_rng(seed)
    model = ClientModel(client_config(services={"stall_timeout_s": 20.0}))
    for _ in range(4):
        model.make_version()
    model.lost = {1}
    versions = [None if rng.random() < 0.3 else int(rng.integers(4)) for _ in range(20)]
    for index, version in enumerate(versions):
        model.ask(asking(f"r{index}", version))
    model.work_off()
    ended = {x.group_id: x.refusal for x in model.events if isinstance(x, e.SamplesFinished)}
    refused = {group_id for group_id, refusal in ended.items() if refusal}
    assert refused == {f"{CLIENT_GROUP}r{index}" for index, version in enumerate(versions) if version == 1}
    assert all("version 1 are kept no longer" in ended[group_id] for group_id in refused)


REQUESTS = messages(
    coordinator_pb2.SampleRequest.DESCRIPTOR,
    {
        "request_id": ["a", "b", "c"],
        "prompt_token_ids": [0, 7, 49],
        "version": [0, 1],
        "max_staleness": [0, 1],
        "temperature": [1.0],
        "top_k": [0],
        "top_p": [1.0],
        "max_tokens": [1, 8],
        "stop_token_ids": [3],
    },
)


@settings(max_examples=60)
@given(st.lists(REQUESTS, max_size=30))
def test_whatever_is_asked_for_is_refused_in_words_or_sampled(
    asked: list[coordinator_pb2.SampleRequest],
) -> None:
    model = ClientModel(client_config())
    model.make_version()
    model.make_version()
    accepted = set()
    for message in asked:
        try:
            (request,) = CALLS["request_samples"].read_request(message)
            model.ask(request)
        except ContractError as error:
            assert str(error)
        else:
            accepted.add(CLIENT_GROUP + request.request_id)
    model.work_off()
    assert model.loop.run.sampled.keys() == accepted
