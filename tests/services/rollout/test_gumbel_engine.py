"""The Gumbel rule in the real engine: start-up check, drafts, hand-over, and the same draw from outside."""

import gc
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from antiphon.core.drafting.config import DraftingSection
from antiphon.core.records import SamplingParameters
from antiphon.sampling import gumbel
from antiphon.sampling import keyed_sampler as ks
from antiphon.sampling.rules import RULES
from tests.services.rollout.test_continuation_engine import COUNT, after, begin, load, requests, run
from tests.services.rollout.test_vllm_engine import VOCABULARY, make_model, scores

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: take the cpu or cuda variant"
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gumbel") / "0"
    return folder, make_model(folder, seed=0)


@pytest.fixture(scope="module")
def engine(model):
    from safetensors.torch import load_file

    from antiphon.services.rollout.engine.environment import EngineSettings
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    started = VllmEngine(
        EngineSettings(
            model_dir=model[0],
            max_model_len=128,
            max_num_seqs=COUNT,
            kv_cache_bytes=8 << 20,
            rule="gumbel",
            draft_tokens=6,
            drafting=DraftingSection(probe_steps=16),
        )
    )
    load(started, [load_file(model[0] / "model.safetensors")], 0)
    yield started
    started.close()
    gc.collect()


def test_tokens_and_logprobs_can_be_drawn_again_from_transformers(engine, model):
    ways = (SamplingParameters(max_tokens=40), SamplingParameters(temperature=0.7, max_tokens=40))
    batch = [replace(request, sampling=ways[i % 2]) for i, request in enumerate(requests()[:8])]
    for name, output in run(engine, batch).items():
        request = next(request for request in batch if request.request_id == name)
        logits, count = scores(model[1], request, output.token_ids), len(output.token_ids)
        rows = ks.RowSampling(temperature=torch.full((count,), request.sampling.temperature).double())
        keys = np.full(count, ks.request_key(request.seed), dtype=np.uint64)
        positions = np.arange(count) + len(request.prompt_token_ids)
        tokens, logprobs = RULES["gumbel"].draw(logits, keys, positions, rows)
        assert tokens.tolist() == output.token_ids.tolist()
        np.testing.assert_allclose(output.logprobs, logprobs.numpy(), atol=1e-5)
        numbers = torch.from_numpy(gumbel.row_keys(keys, positions))
        assert (gumbel.shortfalls(logits, tokens, numbers, rows) == 0).all()


def test_a_lost_completion_is_continued_bit_for_bit(engine):
    whole = run(engine, requests())
    begun = begin(engine, requests(), 7)
    rest = run(engine, after(requests(), begun))
    assert len(begun) >= COUNT // 3
    for name, half in begun.items():
        assert [*half.token_ids.tolist(), *rest[name].token_ids.tolist()] == whole[name].token_ids.tolist()
        logprobs = np.concatenate([half.logprobs, rest[name].logprobs])
        assert logprobs.tobytes() == whole[name].logprobs.tobytes()


def test_startup_check_passes_with_drafts_and_fails_on_a_bent_engine(engine, monkeypatch):
    from antiphon.services.rollout.selfcheck.startup_check import run_startup_check

    report = run_startup_check(engine, draws=600)
    assert report.distributions_hold and report.bits_equal and report.continues
    assert report.drafts is not None and report.drafts.accepted and report.drafts_hold(bits=True)

    def bent(logits, keys, positions, rows):
        return RULES["gumbel"].draw(logits / 1.3, keys, positions, rows)

    def spares_half(logits, keys, positions, rows):
        half = logits.clone()
        half[:, VOCABULARY // 2 :] = -float("inf")
        return RULES["gumbel"].draw(half, keys, positions, rows)

    for fault in (bent, spares_half):
        monkeypatch.setattr(engine._hook, "_draw", fault)
        assert not run_startup_check(engine, draws=600).distributions_hold
