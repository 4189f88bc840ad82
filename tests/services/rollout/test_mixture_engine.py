"""A mixture of experts in the real engine: what swaps compute, and experts that a reload left unpacked."""

import gc
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from antiphon.api.engine import EngineRequest
from antiphon.core.errors import IntegrityError
from antiphon.core.records import SamplingParameters
from antiphon.weights.snapshot import verify, weights_digest
from tests.services.rollout.test_vllm_engine import run
from tests.support.snapshots import probe_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: take the cpu or cuda variant"
    ),
]
SWAPS, VOCABULARY = 20, 64


def make_model(seed: int, width: int):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, moe_intermediate_size=width, num_experts=4,
        num_experts_per_tok=2, tie_word_embeddings=True, max_position_embeddings=256, bos_token_id=2,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model


def published(model):
    """Return a model's weights as they come from a learner."""
    from antiphon.models.experts import pieces_in_files

    held = dict(model.named_parameters())
    pieces = pieces_in_files({name: tensor.shape for name, tensor in held.items()})
    tensors = {name: piece.of(held[piece.tensor].data).clone() for name, piece in pieces.items()}
    return verify(tensors, probe_of(model))


@pytest.fixture(scope="module", params=[32, 48])
def width(request):
    """Of an expert: as it is, and one that packing widens to 64."""
    return request.param


@pytest.fixture(scope="module")
def engine(width, tmp_path_factory):
    from antiphon.services.rollout.engine.environment import EngineSettings
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    folder = tmp_path_factory.mktemp("mixture")
    make_model(0, width).save_pretrained(folder)
    engine = VllmEngine(EngineSettings(folder, max_model_len=160, max_num_seqs=8, kv_cache_bytes=4 << 20))
    yield engine
    engine.close()
    gc.collect()


def load(engine, version: int, weights) -> None:
    engine.load_weights(version, weights, weights_digest(weights))


def apart(engine, weights) -> float:
    """Return the largest difference of the probe's log-probabilities, nats."""
    tokens = weights.probe.tokens
    scores = engine._scores(tokens).gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1)
    return float(np.abs(scores.numpy() - weights.probe.logprobs).max())


def test_after_every_swap_the_engine_computes_what_transformers_does(engine, width):
    worst = 0.0
    for version in range(SWAPS):
        weights = published(make_model(version, width))
        load(engine, version, weights)
        worst = max(worst, apart(engine, weights))
    assert worst <= 1e-4, f"{worst} nat"


@pytest.mark.parametrize("width", [32], indirect=True)
def test_experts_that_are_not_packed_are_found_and_the_version_before_runs_on(engine, width, monkeypatch):
    """As vLLM 0.32 leaves them after a reload, of the very weights that it serves too."""
    from antiphon.services.rollout.engine import vllm_compat

    before = published(make_model(1, width))
    load(engine, 100, before)
    request = EngineRequest("r", (5, 6, 7, 8), 3, SamplingParameters(max_tokens=24))
    expected = run(engine, [request])["r"].token_ids
    pack, skipped = vllm_compat.pack_experts, []

    def once(method, layer):
        if len(skipped) == 2:  # of two layers: the load that undoes the swap
            pack(method, layer)
        else:
            skipped.append(layer)

    monkeypatch.setattr(vllm_compat, "pack_experts", once)
    with pytest.raises(IntegrityError, match=r"something else than the learner.*version 100 is served on"):
        load(engine, 101, verify(dict(before), before.probe))
    assert len(skipped) == 2 and engine.version == 100 and apart(engine, before) <= 1e-4
    assert np.array_equal(run(engine, [request])["r"].token_ids, expected)
