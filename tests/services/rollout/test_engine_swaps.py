"""Swaps of the real vLLM engine: kept caches, and loads that vLLM refuses half-way."""

import copy
import gc
from collections import Counter
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from antiphon.api.engine import EngineRequest
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.records import Probe, SamplingParameters
from antiphon.cpu.compiler import why_not_compiling
from antiphon.weights.snapshot import verify, weights_digest
from tests.services.rollout.test_vllm_engine import VOCABULARY, make_model, redraw, run, run_rest, scores
from tests.support.snapshots import probe_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: take the cpu or cuda variant"
    ),
]

MAX_SEQS, PROMPT, STEPS = 24, 95, 12


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [(folder / str(v), make_model(folder / str(v), seed=v)) for v in (0, 1)]


@pytest.fixture(scope="module")
def weights(models):
    from safetensors.torch import load_file

    tensors = [load_file(path / "model.safetensors") for path, _ in models]
    return [verify(found, probe_of(model)) for found, (_, model) in zip(tensors, models, strict=True)]


def started(models, **changes):
    from antiphon.services.rollout.engine.environment import EngineSettings
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    return VllmEngine(
        EngineSettings(
            model_dir=models[0][0],
            max_model_len=160,
            max_num_seqs=MAX_SEQS,
            **{"kv_cache_bytes": 8 << 20, "prefix_caching": True, **changes},
        )
    )


@pytest.fixture(scope="module", params=["recompute", "keep"])
def idle_engine(request, models):
    engine = started(models, swap_cache=request.param)
    yield engine
    engine.close()
    gc.collect()


@pytest.fixture
def engine(idle_engine, weights):
    idle_engine.abort(list(idle_engine._internal_ids))
    load(idle_engine, weights, 0)
    return idle_engine


def load(engine, weights, version: int) -> None:
    checked = weights[version % 2]
    engine.load_weights(version, checked, checked.digest)


def requests(count: int, prefix: str = "r", tokens: int = PROMPT) -> list[EngineRequest]:
    rng = np.random.default_rng(11)
    return [
        EngineRequest(
            f"{prefix}{i}",
            tuple(int(t) for t in rng.integers(3, VOCABULARY, tokens)),
            int(rng.integers(2**64, dtype=np.uint64)),
            SamplingParameters(max_tokens=50),
        )
        for i in range(count)
    ]


@pytest.fixture
def scheduled(engine, monkeypatch):
    """Count the tokens that each step computes for each request."""
    steps: list[dict[str, int]] = []
    schedule = engine._core.scheduler.schedule

    def counting(*args, **kwargs):
        output = schedule(*args, **kwargs)
        steps.append(dict(output.num_scheduled_tokens))
        return output

    monkeypatch.setattr(engine._core.scheduler, "schedule", counting)
    return steps


@torch.no_grad()
def scores_over_kept_cache(before, after, request: EngineRequest, tokens: np.ndarray, swap: int):
    """Return logits [T] of a completion whose cache was kept before token `swap`.

    What stands before the last token sampled under `before` was computed by it, the rest by `after`.
    """
    ids = torch.tensor([[*request.prompt_token_ids, *tokens.tolist()]])
    start = len(request.prompt_token_ids)
    computed = start + swap - 1
    first = before(ids[:, :computed], use_cache=True)
    second = after(ids[:, computed:-1], past_key_values=first.past_key_values)
    return torch.cat([first.logits[0], second.logits[0]])[start - 1 :]


def test_a_kept_cache_recomputes_nothing_and_is_noted(engine, models, weights, scheduled):
    keeps = engine.settings.swap_cache == "keep"
    batch = requests(8)
    engine.add(batch)
    outputs = {}
    for _ in range(STEPS):
        outputs |= {o.request_id: o for o in engine.step()}
    running = set(engine._live)
    assert running
    load(engine, weights, 1)
    scheduled.clear()
    partial = {p.request_id: p for p in engine.progress(dict.fromkeys((r.request_id for r in batch), 0))}
    outputs |= {o.request_id: o for o in engine.step()}
    again = {request: count - 1 for request, count in scheduled[0].items() if request in running}
    assert set(again) == running
    assert set(again.values()) == {0} if keeps else min(again.values()) >= PROMPT
    outputs |= {o.request_id: o for o in run_rest(engine)}
    spanning = 0
    for request in batch:
        output = outputs[request.request_id]
        assert [span.kept_cache for span in output.spans] == [False, keeps][: len(output.spans)]
        first = output.spans[0].stop
        logits = scores(models[0][1], request, output.token_ids)[:first]
        if len(output.spans) == 2:
            spanning += 1
            assert partial[request.request_id].spans == output.spans[:1]
            over = (
                scores_over_kept_cache(models[0][1], models[1][1], request, output.token_ids, first)
                if keeps
                else scores(models[1][1], request, output.token_ids)
            )
            logits = torch.cat([logits, over[first:]])
            clean, _ = redraw(scores(models[1][1], request, output.token_ids), request)
        tokens, logprobs = redraw(logits, request)
        assert output.token_ids.tolist() == tokens.tolist()
        np.testing.assert_allclose(output.logprobs, logprobs.numpy(), atol=1e-5)
        assert not keeps or len(output.spans) == 1 or output.token_ids.tolist() != clean.tolist()
    assert spanning


def test_new_requests_find_nothing_of_the_weights_before(engine, models, weights):
    """Neither in what finished requests left, nor in what running ones fill after the swap."""
    finished, running = requests(2, "old")
    run(engine, [finished])
    engine.add([running])
    for _ in range(STEPS):
        engine.step()
    waiting = [EngineRequest("waiting", running.prompt_token_ids, 5, running.sampling)]
    engine.add(waiting)
    load(engine, weights, 1)
    for _ in range(25):  # enough to fill further blocks of the cache
        engine.step()
    done = engine.progress({running.request_id: 0})
    outputs = {o.request_id: o for o in run_rest(engine)}
    written = done[0].token_ids.tolist() if done else outputs[running.request_id].token_ids.tolist()
    assert len(written) > 33  # it filled the block that holds positions 96 to 127, over both weights
    few = SamplingParameters(max_tokens=10)
    fresh = [
        EngineRequest("a", finished.prompt_token_ids, 1, finished.sampling),
        EngineRequest("b", (*running.prompt_token_ids, *written[:1]), 2, few),  # fills the blocks before that
        EngineRequest("c", (*running.prompt_token_ids, *written[:34]), 3, few),
    ]
    for request in fresh:
        outputs |= run(engine, [request])
    for request in (*waiting, *fresh):
        if request.request_id not in outputs:
            continue
        output = outputs[request.request_id]
        assert [(s.version, s.kept_cache) for s in output.spans] == [(1, False)]
        tokens, logprobs = redraw(scores(models[1][1], request, output.token_ids), request)
        assert output.token_ids.tolist() == tokens.tolist()
        np.testing.assert_allclose(output.logprobs, logprobs.numpy(), atol=1e-5)


def test_requests_without_a_token_belong_to_the_new_weights_alone(engine, models, weights):
    batch = requests(MAX_SEQS)  # more prompt tokens than one step computes
    engine.add(batch)
    engine.step()
    scheduler = engine._core.scheduler
    begun = [r for r in scheduler.running if not r.output_token_ids and r.num_computed_tokens]
    assert begun
    load(engine, weights, 1)
    outputs = {o.request_id: o for o in run_rest(engine)}
    clean = 0
    for request in batch:
        output = outputs[request.request_id]
        if output.spans[0].version == 0:
            continue
        clean += 1
        assert len(output.spans) == 1 and not output.spans[0].kept_cache
        tokens, _ = redraw(scores(models[1][1], request, output.token_ids), request)
        assert output.token_ids.tolist() == tokens.tolist()
    assert clean >= len(begun)


def drifted(model) -> Probe:
    """Return the probe of a model whose first layer's values are a little others."""
    bent = copy.deepcopy(model)
    with torch.no_grad():
        bent.model.layers[0].self_attn.v_proj.weight.mul_(1.01)
    return probe_of(bent)


def test_what_computes_otherwise_than_the_learner_is_refused_and_disturbs_nothing(engine, models, weights):
    batch = requests(6, tokens=20)
    undisturbed = run(engine, batch)
    engine.add(batch)
    outputs = {}
    for _ in range(5):
        outputs |= {o.request_id: o for o in engine.step()}
    other = verify(dict(weights[1]), drifted(models[1][1]))
    words = r"did not take version 1 .*something else than the learner.* nat apart .*version 0 is served on"
    with pytest.raises(IntegrityError, match=words):
        engine.load_weights(1, other, other.digest)
    assert (engine.version, engine.weights_digest) == (0, weights_digest(weights[0]))
    outputs |= {o.request_id: o for o in run_rest(engine)}
    for name, want in undisturbed.items():
        assert outputs[name].token_ids.tolist() == want.token_ids.tolist()
        assert outputs[name].logprobs.tobytes() == want.logprobs.tobytes()
        assert outputs[name].spans == want.spans


NATIVE = pytest.param(
    {"sampler": "native", "prefix_caching": False},
    marks=pytest.mark.skipif(
        why_not_compiling() is not None, reason=f"the native sampler is compiled: {why_not_compiling()}"
    ),
)


@pytest.mark.parametrize("change", [{}, {"draft_tokens": 6}, NATIVE])
@pytest.mark.parametrize("swap_cache", ["recompute", "keep"])
def test_a_probe_changes_no_token_of_the_requests_around_it(models, weights, swap_cache, change):
    """Not where drafts wait to be verified, nor where the requests have the whole cache."""
    block = 2 * 2 * 32 * 32 * 4  # bytes: keys and values of two layers, 32 tokens, heads of 32
    engine = started(
        models, swap_cache=swap_cache, kv_cache_bytes=block * (57 if not change else 200), **change
    )
    pool, found, free = engine._core.scheduler.kv_cache_manager.block_pool, [], []
    try:
        for swapped in (weights, [verify(dict(one)) for one in weights]):
            # A kept cache that has to give way is computed again by other weights: there is room for all.
            batch = requests(MAX_SEQS if swap_cache == "recompute" else 8)
            if engine.version is not None:
                load(engine, swapped, 4)
            load(engine, swapped, 0)
            engine.add(batch)
            outputs = {}
            for version in (1, 2, 3):
                for _ in range(STEPS):
                    outputs |= {o.request_id: o for o in engine.step()}
                free.append(pool.get_num_free_blocks())
                load(engine, swapped, version)
            outputs |= {o.request_id: o for o in run_rest(engine)}
            found.append([outputs[request.request_id] for request in batch])
        for probed, plain in zip(*found, strict=True):
            assert probed.token_ids.tolist() == plain.token_ids.tolist()
            assert probed.logprobs.tobytes() == plain.logprobs.tobytes()
            assert probed.spans == plain.spans
        assert change or swap_cache == "keep" or min(free) < 3  # of which the probe takes three
    finally:
        engine.close()
        gc.collect()


class Refusal:
    """Lets vLLM refuse one tensor, in the first this many of its reloads."""

    def __init__(self, engine, monkeypatch):
        self._reload = engine._runner.reload_weights
        self.place, self.times = 0, 0
        monkeypatch.setattr(engine._runner, "reload_weights", self)

    def __call__(self, weights_iterator):
        self._reload(weights_iterator=self._with_refused(list(weights_iterator)))

    def _with_refused(self, pairs):
        refused = self.times > 0
        self.times -= 1
        for place, (name, tensor) in enumerate(pairs):
            yield name, torch.zeros(3, 1, 2) if refused and place == self.place else tensor


def test_a_tensor_that_vllm_refuses_leaves_the_version_before(engine, weights, monkeypatch):
    batch = requests(6, tokens=20)
    undisturbed = run(engine, batch)
    refusal = Refusal(engine, monkeypatch)
    seen = Counter()
    for refusal.place in range(len(engine._expected)):
        engine.add(batch)
        outputs = {}
        for _ in range(5):
            outputs |= {o.request_id: o for o in engine.step()}
        refusal.times = 1
        with pytest.raises(IntegrityError, match=r"did not take version 1 .*version 0 is served on"):
            load(engine, weights, 1)
        assert (engine.version, engine.weights_digest) == (0, weights_digest(weights[0]))
        outputs |= {o.request_id: o for o in run_rest(engine)}
        for name, want in undisturbed.items():
            assert outputs[name].token_ids.tolist() == want.token_ids.tolist()
            assert outputs[name].logprobs.tobytes() == want.logprobs.tobytes()
            assert outputs[name].spans == want.spans
        seen[refusal.place] += 1
    assert len(seen) == len(weights[0]) - ("lm_head.weight" in weights[0])
    load(engine, weights, 1)
    assert engine.version == 1


def test_an_engine_that_gets_no_weights_back_serves_nothing(engine, models, weights, monkeypatch):
    refusal = Refusal(engine, monkeypatch)
    batch = requests(4, tokens=20)
    for refusal.place in (0, len(engine._expected) - 1):
        load(engine, weights, 0)
        engine.add(batch)
        for _ in range(5):
            engine.step()
        refusal.times = 2
        with pytest.raises(IntegrityError, match=r"nor version 0 again .*; nothing is served"):
            load(engine, weights, 1)
        assert engine.version is None and engine.weights_digest is None
        before = engine.progress({r.request_id: 0 for r in batch})
        assert before and engine.step() == []
        after = engine.progress({r.request_id: 0 for r in batch})
        assert [p.token_ids.tolist() for p in after] == [p.token_ids.tolist() for p in before]
        with pytest.raises(ContractError, match="no snapshot"):
            engine.add(requests(1, "late"))
        engine.abort([r.request_id for r in batch])
        load(engine, weights, 1)
        for request in batch:
            output = run(engine, [request])[request.request_id]
            tokens, _ = redraw(scores(models[1][1], request, output.token_ids), request)
            assert output.token_ids.tolist() == tokens.tolist()
