"""The real vLLM engine behind the Engine protocol, checked against plain transformers."""

import gc
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from antiphon.api.engine import EngineRequest
from antiphon.core.errors import ConfigError, ContractError, IntegrityError
from antiphon.core.records import FinishReason, SamplingParameters
from antiphon.cpu.compiler import why_not_compiling
from antiphon.sampling import keyed_sampler as ks
from antiphon.sampling.rules import RULES
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import open_snapshot, verify, weights_digest
from tests.support.snapshots import publish

COMPILES = pytest.mark.skipif(
    why_not_compiling() is not None, reason=f"the native sampler is compiled: {why_not_compiling()}"
)
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: take the cpu or cuda variant"
    ),
]

VOCABULARY, END, MAX_LEN, MAX_SEQS = 64, 1, 160, 24


def make_model(folder: Path, seed: int):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        bos_token_id=2,
        eos_token_id=END,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)  # peaked enough for greedy answers to be clear-cut
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [(folder / str(v), make_model(folder / str(v), seed=v)) for v in (0, 1)]


@pytest.fixture(scope="module")
def weights(models, tmp_path_factory):
    """Views of mapped payloads, as a worker hands them over: they cannot be written to."""
    from safetensors.torch import load_file

    store = PayloadStore(tmp_path_factory.mktemp("payloads"))
    tensors = [load_file(path / "model.safetensors") for path, _ in models]
    return [open_snapshot(publish(store, found, version), store) for version, found in enumerate(tensors)]


@pytest.fixture(scope="module")
def idle_engine(models):
    from antiphon.services.rollout.engine.environment import EngineSettings
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    engine = VllmEngine(
        EngineSettings(
            model_dir=models[0][0],
            max_model_len=MAX_LEN,
            max_num_seqs=MAX_SEQS,
            kv_cache_bytes=512 << 10,  # too little for a full batch: some requests must be preempted
        )
    )
    assert engine.version is None and engine.weights_digest is None
    yield engine
    engine.close()
    gc.collect()


@pytest.fixture
def engine(idle_engine, weights):
    assert idle_engine.unfinished == 0
    idle_engine.load_weights(0, verify(weights[0]), weights_digest(weights[0]))
    return idle_engine


def requests(count: int, prefix: str = "r", **sampling) -> list[EngineRequest]:
    rng = np.random.default_rng(7)
    parameters = SamplingParameters(**{"max_tokens": 60, **sampling})
    return [
        EngineRequest(
            f"{prefix}{i}",
            tuple(int(t) for t in rng.integers(3, VOCABULARY, 3 + i % 40)),
            int(rng.integers(2**64, dtype=np.uint64)),
            parameters,
        )
        for i in range(count)
    ]


def run(engine, batch: list[EngineRequest]) -> dict:
    engine.add(batch)
    outputs = {}
    while engine.unfinished:
        outputs |= {o.request_id: o for o in engine.step()}
    assert set(outputs) == {r.request_id for r in batch}
    return outputs


@torch.no_grad()
def scores(model, request: EngineRequest, token_ids: np.ndarray) -> torch.Tensor:
    """Return the model's logits [T, V] at the completion's positions, in one forward pass."""
    ids = [*request.prompt_token_ids, *token_ids.tolist()]
    return model(torch.tensor([ids])).logits[0, len(request.prompt_token_ids) - 1 : -1]


def redraw(logits: torch.Tensor, request: EngineRequest):
    """Draw the completion again from other logits, as an auditor would."""
    sampling, count = request.sampling, len(logits)
    rows = ks.RowSampling(
        temperature=torch.full((count,), sampling.temperature, dtype=torch.float64),
        top_k=torch.full((count,), sampling.top_k or VOCABULARY),
        top_p=torch.full((count,), sampling.top_p, dtype=torch.float64),
    )
    keys = np.full(count, ks.request_key(request.seed), dtype=np.uint64)
    u = ks.uniforms(keys, np.arange(count) + len(request.prompt_token_ids))
    return ks.draw(logits, torch.from_numpy(u), rows)


def test_greedy_is_what_transformers_writes(engine, models):
    batch = requests(20, temperature=0.0)
    outputs = run(engine, batch)
    for request in batch:
        output = outputs[request.request_id]
        logits = scores(models[0][1], request, output.token_ids)
        assert output.token_ids.tolist() == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).max(-1).values
        np.testing.assert_allclose(output.logprobs, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"temperature": 1.4}, {"top_k": 5}, {"top_p": 0.8},
     {"temperature": 0.8, "top_k": 12, "top_p": 0.9}],
    ids=str,
)  # fmt: skip
def test_tokens_and_processed_logprobs_can_be_drawn_again_from_transformers(engine, models, sampling):
    batch = requests(12, **sampling)
    outputs = run(engine, batch)
    for request in batch:
        output = outputs[request.request_id]
        tokens, logprobs = redraw(scores(models[0][1], request, output.token_ids), request)
        assert output.token_ids.tolist() == tokens.tolist()
        np.testing.assert_allclose(output.logprobs, logprobs.numpy(), atol=1e-5)
        assert output.token_ids.dtype == np.int32 and output.logprobs.dtype == np.float32
        ended = output.token_ids[-1] == END
        assert output.finish_reason == (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or len(output.token_ids) == 60
        assert [(s.version, s.start, s.stop) for s in output.spans] == [(0, 0, len(output.token_ids))]


def test_mixed_sampling_in_one_batch(engine, models):
    kinds = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 1.3}]
    batch = [requests(10, prefix=f"{k}-", **kind)[k] for k, kind in enumerate(kinds)]
    outputs = run(engine, batch)
    for request in batch:
        assert np.array_equal(
            run(engine, [request])[request.request_id].token_ids, outputs[request.request_id].token_ids
        )


def test_batch_order_queue_and_preemption_leave_every_token_alone(engine, monkeypatch):
    preempted = []
    scheduler = engine._core.scheduler
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler,
        "_preempt_request",
        lambda *a, **k: (preempted.append(a[0].request_id), preempt(*a, **k))[1],
    )
    batch = requests(60)  # more than run at once, with more tokens than the cache holds
    together = run(engine, batch)
    assert preempted
    backwards = run(engine, batch[::-1])
    staggered = {}
    waiting = batch[20:] + batch[:20]
    while waiting or engine.unfinished:
        engine.add(waiting[:1])
        waiting = waiting[1:]
        staggered |= {o.request_id: o for o in engine.step()}
    for request in batch:
        want = together[request.request_id]
        for got in (backwards[request.request_id], staggered[request.request_id]):
            assert np.array_equal(got.token_ids, want.token_ids)
    for request in batch[::7]:
        alone = run(engine, [request])[request.request_id]
        assert np.array_equal(alone.token_ids, together[request.request_id].token_ids)
        np.testing.assert_allclose(alone.logprobs, together[request.request_id].logprobs, atol=1e-5)


def test_weights_swapped_in_flight_with_exact_spans(engine, models, weights):
    batch = requests(16, max_tokens=80)
    engine.add(batch)
    outputs = {}
    for _ in range(15):
        outputs |= {o.request_id: o for o in engine.step()}
    engine.load_weights(1, verify(weights[1]), weights_digest(weights[1]))
    assert (engine.version, engine.weights_digest) == (1, weights_digest(weights[1]))
    for _ in range(10):
        outputs |= {o.request_id: o for o in engine.step()}
    engine.load_weights(2, verify(weights[0]), weights_digest(weights[0]))
    while engine.unfinished:
        outputs |= {o.request_id: o for o in engine.step()}
    policy = {0: models[0][1], 1: models[1][1], 2: models[0][1]}
    seen = set()
    for request in batch:
        output = outputs[request.request_id]
        assert [s.start for s in output.spans] == [0, *(s.stop for s in output.spans[:-1])]
        assert output.spans[-1].stop == len(output.token_ids)
        for span in output.spans:
            assert span.start < span.stop
            seen.add(span.version)
            tokens, logprobs = redraw(scores(policy[span.version], request, output.token_ids), request)
            part = slice(span.start, span.stop)
            assert output.token_ids[part].tolist() == tokens[part].tolist()
            np.testing.assert_allclose(output.logprobs[part], logprobs[part].numpy(), atol=1e-5)
    assert seen == {0, 1, 2}
    # The weights really differ: the other policy would have written something else.
    long = max(outputs.values(), key=lambda o: o.spans[0].stop)
    request = next(r for r in batch if r.request_id == long.request_id)
    other, _ = redraw(scores(policy[1], request, long.token_ids), request)
    assert long.token_ids[: long.spans[0].stop].tolist() != other[: long.spans[0].stop].tolist()


def test_swap_before_the_first_token_leaves_one_span(engine, weights):
    (request,) = requests(1)
    engine.add([request])
    engine.load_weights(1, verify(weights[1]), weights_digest(weights[1]))
    (output,) = run_rest(engine)
    assert {s.version for s in output.spans} == {1}


def run_rest(engine) -> list:
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
    return outputs


@COMPILES
def test_native_sampler_behind_the_same_setting(engine, models, weights):
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    batch = requests(8, temperature=0.8, top_k=20)
    keyed = run(engine, batch)
    other = VllmEngine(replace(engine.settings, sampler="native"))
    other.load_weights(0, verify(weights[0]), weights_digest(weights[0]))
    native, again = run(other, batch), run(other, batch)  # not closed: both share vLLM's process group
    assert any(not np.array_equal(native[i].token_ids, keyed[i].token_ids) for i in native)
    for request in batch:
        output = native[request.request_id]
        assert np.array_equal(output.token_ids, again[request.request_id].token_ids)
        logits = scores(models[0][1], request, output.token_ids) / 0.8
        kept = logits.masked_fill(logits < logits.topk(20).values[:, -1:], -torch.inf).log_softmax(-1)
        expected = kept.gather(-1, torch.from_numpy(output.token_ids).long()[:, None])[:, 0]
        np.testing.assert_allclose(output.logprobs, expected.numpy(), atol=1e-5)


def test_engine_scores_prompts_as_transformers_does(engine, models):
    prompt = (5, 9, 13, 21)
    with torch.no_grad():
        expected = models[0][1](torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    np.testing.assert_allclose(engine.distribution(prompt), expected.numpy(), atol=1e-5)
    assert engine.unfinished == 0


def test_startup_check_passes_on_a_sound_engine_and_fails_on_a_bent_one(engine, monkeypatch):
    from antiphon.services.rollout.selfcheck.startup_check import run_startup_check

    report = run_startup_check(engine, draws=600)
    assert all(check.degrees > 3 for check in report.distributions)
    assert report.distributions_hold and report.bits_equal
    assert max(check.logprob_error for check in report.distributions) < 1e-4

    def bent(logits, keys, positions, rows):
        return RULES["inverse_cdf"].draw(logits / 1.3, keys, positions, rows)

    def tells_another(logits, keys, positions, rows):
        tokens, logprobs = RULES["inverse_cdf"].draw(logits, keys, positions, rows)
        return tokens, logprobs - 0.01

    for fault in (bent, tells_another):
        monkeypatch.setattr(engine._hook, "_draw", fault)
        assert not run_startup_check(engine, draws=600).distributions_hold


def test_abort_forgets_and_ids_can_be_used_again(engine):
    batch = requests(30)
    engine.add(batch)
    engine.step()
    engine.abort([r.request_id for r in batch[:29]] + ["never seen"])
    assert engine.unfinished == 1
    reference = run_rest(engine)
    outputs = run(engine, batch)
    assert np.array_equal(outputs[batch[29].request_id].token_ids, reference[0].token_ids)


def test_same_snapshot_again_costs_nothing_and_changes_nothing(engine, weights, monkeypatch):
    def refuse(**_):
        raise AssertionError("the weights were loaded a second time")

    monkeypatch.setattr(engine._runner, "reload_weights", refuse)
    engine.load_weights(0, verify(weights[0]), weights_digest(weights[0]))


@pytest.mark.parametrize(
    ("sampling", "word"),
    [({"top_p": 0.0}, "top_p"), ({"top_k": -1}, "top_k"), ({"temperature": float("nan")}, "temperature"),
     ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 400}, "max_model_tokens")],
)  # fmt: skip
def test_impossible_sampling_is_refused_in_words(engine, sampling, word):
    with pytest.raises(ConfigError, match=word):
        engine.add(requests(1, **sampling))
    assert engine.unfinished == 0


def test_impossible_requests_are_refused(engine):
    good = requests(1)[0]
    engine.add([good])
    with pytest.raises(ContractError, match="already in flight"):
        engine.add([good])
    engine.abort([good.request_id])
    for prompt in ((), (VOCABULARY,), (-1,)):
        with pytest.raises(ContractError, match="token ids"):
            engine.add([EngineRequest("x", prompt, 0, SamplingParameters())])
    with pytest.raises(ContractError, match="64-bit"):
        engine.add([EngineRequest("x", (3,), 2**64, SamplingParameters(max_tokens=4))])


def test_snapshots_of_another_model_are_refused_untouched(engine, weights):
    missing = dict(list(weights[1].items())[1:])
    with pytest.raises(IntegrityError, match="missing"):
        engine.load_weights(1, verify(missing), "digest-1")
    with pytest.raises(IntegrityError, match="unknown"):
        engine.load_weights(1, verify({**weights[1], "extra": torch.zeros(1)}), "digest-1")
    with pytest.raises(IntegrityError, match="have digest"):
        engine.load_weights(1, verify(weights[1]), "digest-1")
    name = "model.norm.weight"
    with pytest.raises(IntegrityError, match=name):
        engine.load_weights(1, verify({**weights[1], name: torch.zeros(3)}), "digest-1")
    assert (engine.version, engine.weights_digest) == (0, weights_digest(weights[0]))


def test_nan_weights_are_named(engine, weights):
    name = "model.norm.weight"
    bad = {**weights[0], name: torch.full_like(weights[0][name], float("nan"))}
    engine.load_weights(9, verify(bad), weights_digest(bad))
    engine.add(requests(1, max_tokens=4))
    with pytest.raises(IntegrityError, match="version 9"):
        run_rest(engine)


def test_before_any_snapshot_nothing_is_served(engine, monkeypatch):
    monkeypatch.setattr(engine, "version", None)
    with pytest.raises(ContractError, match="no snapshot"):
        engine.add(requests(1))


def test_bad_model_directories_are_named(tmp_path, models):
    from antiphon.services.rollout.engine.environment import EngineSettings
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    with pytest.raises(ConfigError, match=r"config\.json"):
        VllmEngine(EngineSettings(model_dir=tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="safetensors"):
        VllmEngine(EngineSettings(model_dir=tmp_path))
    (tmp_path / "model.safetensors").write_bytes((models[0][0] / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="eos_token_id"):
        VllmEngine(EngineSettings(model_dir=tmp_path))
