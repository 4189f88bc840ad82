"""A Parallax network as an engine: with a stand-in it keeps what is declared, and what goes wrong is said."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from antiphon.api.engine import EngineRequest
from antiphon.benchmarks.engine_contract import MODEL
from antiphon.benchmarks.parts.contract import GREEDY, Subject, Version, examine, requests_of, versions_of
from antiphon.core.config import build_config
from antiphon.core.errors import AntiphonError, ConfigError, ContractError, IntegrityError
from antiphon.core.records import FinishReason, SamplingParameters
from antiphon.services.rollout.engine import server_engine
from antiphon.services.rollout.engine.environment import ServerSettings
from antiphon.services.rollout.engine.parallax_engine import TRIES, ParallaxEngine, blocks_of
from antiphon.services.rollout.process import build_engine
from antiphon.weights.transports.lattica import LatticaNode, missing_reason, multiaddress
from tests.support.parallax_server import MemoryPeer, ParallaxServer, lettered, parallax

pytestmark = pytest.mark.timeout(300)
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lettered(MODEL, tmp_path_factory.mktemp("lettered"))


@pytest.fixture(scope="module")
def versions(model: Path) -> tuple[Version, ...]:
    return versions_of(model)


@pytest.fixture
def peer() -> MemoryPeer:
    return MemoryPeer()


@pytest.fixture
def server(model: Path, peer: MemoryPeer) -> Iterator[ParallaxServer]:
    with parallax(model, lambda address: peer.blocks[address]) as server:
        yield server


@pytest.fixture
def engine(model: Path, server: ParallaxServer, peer: MemoryPeer) -> Iterator[ParallaxEngine]:
    engine = ParallaxEngine(ServerSettings(server.url, model, None, 128, 20.0, 60.0), lambda folder: peer)
    yield engine
    engine.close()
    assert peer.closed


@pytest.fixture
def subject(model: Path, engine: ParallaxEngine, versions: tuple[Version, ...]) -> Subject:
    return Subject(engine, model, versions)


def refused(kind: type[AntiphonError], url: str, model: Path) -> str:
    with pytest.raises(kind) as caught:
        ParallaxEngine(ServerSettings(url, model, None, 128, 20.0, 60.0), lambda folder: MemoryPeer())
    return str(caught.value)


@torch.no_grad()
def greedy(version: Version, request: EngineRequest, end: int) -> list[int]:
    """Continue a prompt by the likeliest tokens of a model of transformers."""
    tokens = list[int]()
    while len(tokens) < request.sampling.max_tokens and tokens[-1:] != [end]:
        known = torch.tensor([[*request.prompt_token_ids, *tokens]])
        tokens.append(int(version.model(known).logits[0, -1].argmax()))
    return tokens


def test_it_keeps_what_is_declared(subject: Subject) -> None:
    found = examine(subject)
    assert not found["failed"] and found["passed"] == found["declared"] == ["engine"]
    assert len(subject.engine.abilities.missing) == 9 and not subject.engine.continues


def test_every_node_computes_with_each_version(
    subject: Subject, server: ParallaxServer, peer: MemoryPeer
) -> None:
    for version in range(3):
        subject.load(version)
        requests = requests_of(f"v{version}", GREEDY)[:3]
        for request, output in zip(requests, subject.run(requests), strict=True):
            assert output.token_ids.tolist() == greedy(subject.versions[version], request, end=1)
            assert not output.logprobs.any() and output.logprobs.dtype == np.float32
            assert [span.version for span in output.spans] == [version]
        # What a node that joins later needs is held, and nothing else is.
        assert set(peer.blocks) == set(server.orders[-1]["cid"]) and len(peer.blocks) == 3 + 2
    stamps = [order["time_stamp"] for order in server.orders]
    assert stamps == sorted(set(stamps)) and all(isinstance(one, int) for one in stamps)


def test_requests_in_flight_begin_again_and_see_one_version(subject: Subject, server: ParallaxServer) -> None:
    subject.load(0)
    requests = requests_of("swapped")
    subject.engine.add(requests)
    early = {one.request_id: one for _ in range(3) for one in subject.engine.step()}
    assert len(early) < len(requests) and not subject.engine.progress(dict.fromkeys(early, 0))
    subject.load(1)
    for request, one in zip(requests, subject.finish(requests, dict(early)), strict=True):
        assert {span.version for span in one.spans} == {0 if request.request_id in early else 1}
    assert set.union(*server.answers) <= {(0, 0), (1, 1)}


def test_nothing_is_sampled_while_nodes_hold_different_weights(
    subject: Subject, server: ParallaxServer, engine: ParallaxEngine
) -> None:
    subject.load(0)
    server.lazy = {1}
    engine.settings = replace(engine.settings, swap_s=1.0)
    with pytest.raises(
        IntegrityError, match=r"not all nodes .* took version 1 within 0.9 s.*nothing is served"
    ):
        subject.load(1)
    assert server.stamps[0] > server.stamps[1] and engine.version is None and engine.step() == []
    with pytest.raises(ContractError, match="load_weights must come before add"):
        engine.add(requests_of("mixed"))
    server.lazy = set()
    subject.load(1)
    subject.run(requests_of("whole")[:2])
    assert set.union(*server.answers) == {(1, 1)}


def test_a_swap_by_somebody_else_is_said(subject: Subject, server: ParallaxServer) -> None:
    subject.load(0)
    server.stamps = [1e12, 1e12]
    subject.load(1)  # ours is later than any before it
    assert server.orders[-1]["time_stamp"] == 10**12 + 1
    server.stamps, swap = [1e12, 1e12], server.swap

    def theirs(node: int) -> None:
        swap(node)
        server.stamps[node] = 2e12

    server.swap = theirs  # type: ignore[method-assign]
    with pytest.raises(IntegrityError, match="somebody else swaps the weights"):
        subject.load(2)


@pytest.mark.parametrize(
    "said", [str.lstrip, str.rstrip, lambda text: f"<user>{text}", lambda text: f"{text}x"]
)
def test_a_chat_template_that_changes_prompts_is_refused(
    model: Path, server: ParallaxServer, said: object
) -> None:
    server.template = said  # type: ignore[assignment]
    assert re.search(
        r"made \d+ tokens of a prompt that has 14; .*\{\{ messages\[0\]\['content'\] \}\}",
        refused(ConfigError, server.url, model),
    )


def test_a_scheduler_without_a_model_is_refused_and_a_template_that_changes_later(
    model: Path, server: ParallaxServer, subject: Subject
) -> None:
    server.away = True
    assert "--enable-weight-refit True" in refused(ConfigError, server.url, model)
    server.away = False
    subject.load(0)
    server.template = lambda text: text + "x"
    with pytest.raises(IntegrityError, match=r"made 9 tokens of the prompt of request late-0, which has 8"):
        subject.run(requests_of("late")[:1])


def test_a_text_of_other_tokens_begins_again_but_not_for_ever(
    subject: Subject, server: ParallaxServer
) -> None:
    subject.load(0)
    (request,) = requests_of("others", SamplingParameters(max_tokens=4))[:1]
    # Four tokens that come as a text of two; half a character; then one that is as it was sampled.
    server.script = [("12", 4), ("1\ufffd23", 4), ("1+2=", 4)]
    (output,) = subject.run([request])
    assert output.token_ids.tolist() == [4, 13, 5, 17] and output.finish_reason is FinishReason.LENGTH
    server.script = [("12345", 5)]
    with pytest.raises(IntegrityError, match="got 5 tokens, but at most 4 were asked for"):
        subject.run([request])
    subject.engine.abort([request.request_id])
    server.script = [("12", 4)] * TRIES
    with pytest.raises(IntegrityError, match=rf"came back {TRIES} times as a text of other tokens"):
        subject.run([request])
    subject.engine.abort([request.request_id])
    server.script = [("12", 4)]
    (kept,) = subject.run([replace(request, sampling=replace(request.sampling, temperature=0.0))])
    assert kept.token_ids.tolist() == [4, 5] and not server.script


def test_a_full_server_is_asked_again_and_no_redirect_is_followed(
    subject: Subject, server: ParallaxServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "BUSY_S", 0.01)
    subject.load(0)
    server.script = [429, 429, ("1", 1)]
    (one,) = requests_of("full", SamplingParameters(max_tokens=1))[:1]
    assert subject.run([one])[0].token_ids.tolist() == [4]
    server.script = [307]
    with pytest.raises(IntegrityError, match="refused request full-0 with status 307: busy"):
        subject.run([one])


def test_prompts_that_no_text_gives_and_texts_that_end_are_refused(
    tmp_path: Path, versions: tuple[Version, ...], subject: Subject
) -> None:
    subject.load(0)
    (one,) = requests_of("refused")[:1]
    for sampling in (
        SamplingParameters(stop=("x",), max_tokens=8),
        SamplingParameters(stop_token_ids=(5,), max_tokens=8),
    ):
        with pytest.raises(ConfigError, match=r"rollout\.engine=parallax cannot say"):
            subject.engine.add([replace(one, sampling=sampling)])
    assert not subject.engine.unfinished


def test_a_prompt_of_tokens_that_its_text_does_not_have_is_refused() -> None:
    """The demo's tokenizer has reserved tokens, which no text gives."""
    versions, peer = versions_of(MODEL), MemoryPeer()
    with parallax(MODEL, lambda address: peer.blocks[address]) as server:
        engine = ParallaxEngine(ServerSettings(server.url, MODEL, None, 128, 20.0, 60.0), lambda folder: peer)
        engine.load_weights(0, versions[0].weights, versions[0].weights.digest)
        with pytest.raises(ConfigError, match="has other tokens than its text"):
            engine.add([EngineRequest("reserved", (2, 59), 1, SamplingParameters(max_tokens=8))])
        engine.close()


NAMES = st.sampled_from(
    ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    + [f"model.layers.{i}.{part}.weight" for i in (0, 1, 10) for part in ("mlp.up_proj", "self_attn.q_proj")]
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(NAMES, st.integers(1, 5), min_size=1))
def test_blocks_hold_each_tensor_once_and_one_layer_each(sizes: dict[str, int]) -> None:
    weights = {name: torch.arange(float(size)) for name, size in sizes.items()}
    found: dict[str, torch.Tensor] = {}
    for names, data in blocks_of(weights):
        held = load(data)
        assert set(held) == set(names) and not set(held) & set(found)
        assert len({re.sub(r"(layers\.\d+).*", r"\1", name) for name in names}) == 1
        found |= held
    assert set(found) == set(weights) and all(torch.equal(found[name], weights[name]) for name in found)


def test_a_run_builds_it(model: Path, server: ParallaxServer) -> None:
    there = f"/ip4/{HOST}/tcp/9/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    config = build_config(
        {
            "model": {"path": str(model)},
            "rollout": {
                "engine": "parallax",
                "engine_url": server.url,
                "engine_peer": there,
                "logprobs": "learner",
            },
            "sampling": {"sampler": "native"},
            "loop": {"max_staleness": 0},
            "trust": {"audits": "off"},
        }
    )
    if missing_reason() is not None:
        with pytest.raises(ConfigError, match="the package lattica is missing"):
            build_engine(config)
        return
    engine = build_engine(config)
    assert isinstance(engine, ParallaxEngine) and engine.version is None
    engine.close()


@pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or "")
def test_nodes_take_their_blocks_from_a_lattica_network(
    tmp_path: Path, model: Path, versions: tuple[Version, ...]
) -> None:
    from antiphon.system.ports import free_port

    port = free_port(HOST)
    node = LatticaNode(tmp_path / "scheduler", HOST, port)
    with parallax(model, lambda address: node.get(address, 20)) as server:
        there = f"{multiaddress(HOST, port)}/p2p/{node.peer_id}"
        engine = ParallaxEngine(
            ServerSettings(server.url, model, None, 128, 20.0, 60.0),
            lambda folder: LatticaNode(folder, HOST, 0, [there]),
        )
        subject = Subject(engine, model, versions)
        subject.load(1)
        (request,) = requests_of("network", GREEDY)[:1]
        assert subject.run([request])[0].token_ids.tolist() == greedy(versions[1], request, end=1)
        engine.close()
    node.close()
