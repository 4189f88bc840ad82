"""A vLLM server as an engine: the real server keeps what is declared, and what goes wrong there is said."""

import asyncio
import json
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from antiphon.api.engine import EngineRequest
from antiphon.benchmarks.engine_contract import MODEL
from antiphon.benchmarks.parts.contract import Subject, Version, examine, requests_of, versions_of
from antiphon.benchmarks.parts.vllm_server import serving
from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError, UnavailableError
from antiphon.core.records import FinishReason, Probe, SamplingParameters
from antiphon.core.seeds import generator
from antiphon.models.codec import TextCodec
from antiphon.services.rollout.engine import http_engine
from antiphon.services.rollout.engine.environment import ServerSettings
from antiphon.services.rollout.engine.http_engine import HttpEngine
from antiphon.weights.snapshot import verify
from tests.support.processes import children_that_run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: take the cpu or cuda variant"
    ),
]
SETTINGS = ServerSettings("", MODEL, None, 128, 20.0, 60.0)


@pytest.fixture(scope="module")
def versions() -> tuple[Version, ...]:
    return versions_of(MODEL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(MODEL, tmp_path_factory.mktemp("server") / "log") as url:
        yield url


@pytest.fixture
def engine(server: str) -> Iterator[HttpEngine]:
    engine = HttpEngine(replace(SETTINGS, url=server))
    yield engine
    engine.close()


def post(url: str, path: str, body: object = None) -> Any:
    data = b"" if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"{url}{path}", data, {"content-type": "application/json"}, method="POST")
    with urllib.request.urlopen(asked, timeout=30.0) as answer:
        return json.loads(answer.read())


def test_a_server_keeps_what_is_declared(engine: HttpEngine, versions: tuple[Version, ...]) -> None:
    found = examine(Subject(engine, MODEL, versions))
    assert not found["failed"] and found["passed"] == found["declared"]
    assert {"keyed", "drafts"}.isdisjoint(found["declared"]) and len(found["declared"]) == 8


def test_the_second_request_of_a_prompt_tells_what_was_cached(
    engine: HttpEngine, versions: tuple[Version, ...]
) -> None:
    subject = Subject(engine, MODEL, versions)
    subject.load(0)
    prompt = tuple(generator("cached-prompt", 0).integers(3, 57, size=100).tolist())
    found = []
    for name in ("first", "second"):
        asked = EngineRequest(name, prompt, 7, SamplingParameters(max_tokens=4))
        found.append(subject.run([asked])[0].cached_tokens)
    subject.load(1)
    found.append(subject.run([replace(asked, request_id="swapped")])[0].cached_tokens)
    assert found[0] == found[2] == 0 and len(prompt) // 2 < found[1] < len(prompt)


def test_weights_that_compute_something_else_are_refused_and_the_old_ones_sample_on(
    engine: HttpEngine, versions: tuple[Version, ...]
) -> None:
    subject = Subject(engine, MODEL, versions)
    subject.load(0)
    requests = requests_of("undone")
    outputs, had = subject.started(requests)
    probe = versions[1].weights.probe
    assert probe is not None
    other = verify(
        dict(versions[1].weights), Probe(probe.tokens, versions[2].weights.probe.logprobs, "float32")
    )  # type: ignore[union-attr]
    with pytest.raises(IntegrityError, match=r"something else than the learner.*version 0 is served on"):
        engine.load_weights(1, other, other.digest)
    assert engine.version == 0 and had
    for request, one in zip(requests, subject.finish(requests, outputs), strict=True):
        assert {span.version for span in one.spans} == {0}
        scores = subject.scores(request, one.token_ids, 0)
        assert abs(scores - one.logprobs).max() < 1e-3


def test_a_server_that_somebody_else_changes_ends_the_worker(
    engine: HttpEngine, server: str, versions: tuple[Version, ...]
) -> None:
    subject = Subject(engine, MODEL, versions)
    subject.load(0)
    post(server, "/update_weight_version", {"new_version": "somebody's"})
    with pytest.raises(IntegrityError, match=r"it calls \["):
        subject.run(requests_of("foreign"))


def test_requests_that_others_abort_end_the_worker(
    engine: HttpEngine, server: str, versions: tuple[Version, ...]
) -> None:
    subject = Subject(engine, MODEL, versions)
    subject.load(0)
    subject.started(requests_of("aborted"), 1)
    post(server, "/pause?mode=abort")
    try:
        with pytest.raises(IntegrityError, match=r"ended request aborted-\d+ with 'abort'"):
            subject.finish(requests_of("aborted"), {})
    finally:
        post(server, "/resume")


def test_a_server_that_is_killed_or_stands_still_ends_the_worker(
    tmp_path: Path, versions: tuple[Version, ...]
) -> None:
    with serving(MODEL, tmp_path / "log") as url:
        engine = HttpEngine(replace(SETTINGS, url=url))
        subject = Subject(engine, MODEL, versions)
        subject.load(0)
        engine.settings = replace(engine.settings, silent_s=2.0)
        (process,) = children_that_run(url.rpartition(":")[2])
        family = [process, *process.children(recursive=True)]
        subject.engine.add(requests_of("still"))
        for one in family:
            one.send_signal(signal.SIGSTOP)
        with pytest.raises(UnavailableError, match=r"brought no token for \d+ s while \d+ requests run"):
            subject.finish(requests_of("still"), {})
        for one in family:
            one.kill()
        with pytest.raises(UnavailableError, match=r"cannot be asked"):
            subject.load(1)
        engine.close()


@contextmanager
def fake(paths: list[str], others: dict[str, Any] | None = None, **model: object) -> Iterator[str]:
    """Serve what a server says of itself, and what `others` say instead: JSON, or a function of a request."""
    said = {"logprobs_mode": "processed_logprobs", "max_model_len": 128, "dtype": "torch.float32"}
    info = {
        "model_config": {
            key: value
            for key, value in (said | {"hf_overrides": {"tie_word_embeddings": False}} | model).items()
            if value is not None
        },
        "device_config": {"device": "cpu"},
    }
    ready, loop = threading.Event(), asyncio.new_event_loop()
    found: list[str] = []

    async def begin() -> web.AppRunner:
        app = web.Application()
        bodies = {
            "/openapi.json": {"paths": {path: {} for path in paths}},
            "/server_info": {"vllm_config": info},
        }
        for path, body in (bodies | (others or {})).items():
            app.router.add_route("*", path, body if callable(body) else lambda _, said=body: _json(said))
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        return runner

    async def _json(body: object) -> web.Response:
        return web.json_response(body)

    def serve() -> None:
        runner = loop.run_until_complete(begin())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(20.0)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20.0)


GENERATE, RPC = "/inference/v1/generate", "/collective_rpc"


@pytest.mark.parametrize(
    ("paths", "model", "said"),
    [
        ([RPC], {}, "start it with --tokens-only"),
        ([GENERATE], {}, "start it with VLLM_SERVER_DEV_MODE=1"),
        ([GENERATE, RPC], {"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ([GENERATE, RPC], {"max_model_len": 64}, "--max-model-len 128"),
        ([GENERATE, RPC], {"hf_overrides": {}}, "--hf-overrides"),
        ([GENERATE, RPC], {"logprobs_mode": None}, "says of itself what no vLLM 0.32 does .*logprobs_mode"),
    ],
)
def test_a_server_that_was_started_otherwise_is_refused_with_the_option(
    paths: list[str], model: dict[str, object], said: str
) -> None:
    with fake(paths, **model) as url, pytest.raises(ConfigError, match=said):
        HttpEngine(replace(SETTINGS, url=url))


@pytest.mark.parametrize("info", [{}, [], {"vllm_config": {"model_config": None}}], ids=str)
def test_a_server_that_says_something_else_of_itself_is_refused(info: object) -> None:
    with (
        fake([GENERATE, RPC], {"/server_info": info}) as url,
        pytest.raises(ConfigError, match=r"no vLLM 0.32"),
    ):
        HttpEngine(replace(SETTINGS, url=url))


def test_a_server_that_sends_elsewhere_is_not_followed() -> None:
    """What is asked of one server, weights above all, is nobody else's."""
    asked: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        asked.append(request.path)
        raise web.HTTPTemporaryRedirect("/server_info?elsewhere")

    with (
        fake([GENERATE, RPC], {"/openapi.json": elsewhere}) as url,
        pytest.raises(IntegrityError, match=r"answered /openapi.json with status 307"),
    ):
        HttpEngine(replace(SETTINGS, url=url))
    assert asked == ["/openapi.json"]


def _stream(*chunks: dict[str, Any]) -> Any:
    async def said(request: web.Request) -> web.Response:
        if "prompt_logprobs" in (await request.json())["sampling_params"]:
            return web.json_response({"prompt_logprobs": [None]})
        lines = "".join(f"data: {json.dumps({'choices': [one]})}\n\n" for one in chunks)
        return web.Response(text=lines, content_type="text/event-stream")

    return said


def _chunk(tokens: list[int], ids: list[int], reason: str | None = None) -> dict[str, Any]:
    content = [{"token_id": one, "logprob": -1.0} for one in ids]
    return {"token_ids": tokens, "logprobs": {"content": content}, "finish_reason": reason}


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([_chunk([5], [6])], "got tokens that are none"),
        ([_chunk([5], [5])], "ended without a reason"),
        ([_chunk([5] * 99, [5] * 99, "length")], r"got 99 tokens, but at most \d+ were asked for"),
        ([_chunk([5], [])], "got tokens that are none"),
        ([{"token_ids": [5]}], "answered what no vLLM 0.32 does"),
    ],
    ids=["other-ids", "half", "more", "no-logprobs", "no-fields"],
)
def test_streams_that_cannot_be_end_the_worker(
    versions: tuple[Version, ...], chunks: list[dict[str, Any]], said: str
) -> None:
    weights = versions[0].weights
    with fake([GENERATE, RPC], OK | {GENERATE: _stream(*chunks)}) as url:
        engine = HttpEngine(replace(SETTINGS, url=url))
        with pytest.raises(IntegrityError, match=r"scores no prompt as vLLM 0.32 does .*nothing is served"):
            engine.load_weights(0, weights, weights.digest)
        plain = verify(dict(weights), None)
        engine.load_weights(0, plain, plain.digest)
        engine.add(requests_of("odd"))
        with pytest.raises(IntegrityError, match=said):
            while True:
                engine.step()
        engine.close()


OK = {path: {"ok": True} for path in ("/pause", RPC, "/update_weight_version", "/resume")}


@contextmanager
def met_by_a_swap(
    versions: tuple[Version, ...], chunk: dict[str, Any], monkeypatch: pytest.MonkeyPatch, stop: str = ""
) -> Iterator[HttpEngine]:
    """Let a request get its stream while the weights of the next version are written, and swap."""
    first, second = (verify(dict(one.weights), None) for one in versions[:2])
    with fake([GENERATE, RPC], OK | {GENERATE: _stream(chunk)}) as url:
        engine = HttpEngine(replace(SETTINGS, url=url))
        engine.load_weights(0, first, first.digest)
        (one,) = requests_of("met")[:1]
        engine.add([replace(one, sampling=replace(one.sampling, stop=(stop,) if stop else ()))])
        write, over = http_engine._write, threading.Event()
        (live,) = engine._live.values()
        assert live.task is not None
        live.task.add_done_callback(lambda _: over.set())

        def written(*arguments: Any) -> None:
            assert over.wait(20.0)
            write(*arguments)

        monkeypatch.setattr(http_engine, "_write", written)
        engine.load_weights(1, second, second.digest)
        yield engine
        engine.close()


def test_what_goes_wrong_with_a_request_during_a_swap_ends_the_worker(
    versions: tuple[Version, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = _chunk([5], [5], "length") | {"weight_versions": [{"version": "9"}]}
    with met_by_a_swap(versions, foreign, monkeypatch) as engine:
        with pytest.raises(IntegrityError, match=r"it calls \['9'\], not under version 0"):
            engine.step()
        assert not engine.progress({"met-0": 0})


def test_a_turn_that_ends_during_a_swap_tells_no_token_behind_its_end(
    versions: tuple[Version, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = list(TextCodec.load(str(MODEL)).encode("1+2=3", add_special_tokens=False))
    with met_by_a_swap(versions, _chunk(ids, ids), monkeypatch, stop="2") as engine:
        (piece,) = engine.progress({"met-0": 0})
        (output,) = engine.step()
    assert piece.token_ids.tolist() == output.token_ids.tolist() == ids[:3]
    assert output.finish_reason is FinishReason.STOP and [one.version for one in output.spans] == [0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_float32_of_a_gpu_is_as_coarse_as_its_tensor_cores(
    versions: tuple[Version, ...], device: str
) -> None:
    """As for our own engine: what rounding explains there would be a fault on a CPU."""
    weights = versions[0].weights
    assert weights.probe is not None
    tokens = weights.probe.tokens[: SETTINGS.max_model_len - 1]
    near = [{str(t): {"logprob": p + 1e-3}} for t, p in zip(tokens[1:], weights.probe.logprobs, strict=False)]
    model = {"logprobs_mode": "processed_logprobs", "max_model_len": 128, "dtype": "torch.float32"}
    model |= {"hf_overrides": {"tie_word_embeddings": False}}
    info = {"vllm_config": {"model_config": model, "device_config": {"device": device}}}
    said = {"/server_info": info, GENERATE: {"prompt_logprobs": [None, *near]}}
    with fake([GENERATE, RPC], OK | said) as url:
        engine = HttpEngine(replace(SETTINGS, url=url))
        if device == "cpu":
            with pytest.raises(IntegrityError, match="something else than the learner"):
                engine.load_weights(0, weights, weights.digest)
        else:
            engine.load_weights(0, weights, weights.digest)
        assert engine.version == (None if device == "cpu" else 0)
        engine.close()


def test_nobody_there_and_no_folder_are_said(tmp_path: Path) -> None:
    def refused(settings: ServerSettings, kind: type[AntiphonError]) -> str:
        with pytest.raises(kind) as caught:
            HttpEngine(settings)
        return str(caught.value)

    away = refused(replace(SETTINGS, url="http://127.0.0.1:9"), UnavailableError)
    assert "rollout.engine_url=http://127.0.0.1:9 cannot be asked" in away
    folder = refused(replace(SETTINGS, url="http://127.0.0.1:9", folder=tmp_path / "no"), ConfigError)
    assert "rollout.engine_folder" in folder
