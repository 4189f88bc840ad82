"""A head in float32 on both sides: in bfloat16 the engine's logprobs come closer to the learner's."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

MODEL = Path(__file__).resolve().parents[3] / "examples" / "models" / "chain-sum"


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return [int(token) for token in np.random.default_rng(7).integers(4, 40, 96)]


def learner_logprobs(tokens: list[int], float32_head: bool) -> np.ndarray:
    from antiphon.services.learner.policy import load_causal_model
    from antiphon.services.learner.scoring import completion_logits

    model = load_causal_model(str(MODEL), torch.bfloat16, False)
    wanted = [np.arange(len(tokens) - 1)]
    parts = completion_logits(model, [(tokens[:1], tokens[1:])], wanted, 1 << 22, float32_head)
    logits = torch.cat([found.float() for _, _, found in parts])
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1).numpy()


def engine_logprobs(tokens: list[int], float32_head: bool) -> np.ndarray:
    from antiphon.services.rollout.engine.environment import EngineSettings
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    engine = VllmEngine(
        EngineSettings(
            MODEL, max_model_len=160, max_num_seqs=8, kv_cache_bytes=4 << 20, dtype="bfloat16",
            float32_head=float32_head,
        )
    )  # fmt: skip
    try:
        scores = engine._scores(tokens)
        return scores.gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1).numpy()
    finally:
        engine.close()
        gc.collect()


def test_in_bfloat16_a_float32_head_on_both_sides_brings_them_closer(tokens: list[int]) -> None:
    usual = np.abs(engine_logprobs(tokens, False) - learner_logprobs(tokens, False)).mean()
    closer = np.abs(engine_logprobs(tokens, True) - learner_logprobs(tokens, True)).mean()
    apart = np.abs(engine_logprobs(tokens, True) - learner_logprobs(tokens, False)).mean()
    print(f"mean difference {usual:.2g} nats; float32 head {closer:.2g}, on one side alone {apart:.2g}")
    assert closer < 0.95 * usual and closer < apart


def test_vllm_understands_what_it_is_told_of_graphs_and_memory() -> None:
    from vllm.config import CompilationConfig
    from vllm.config.compilation import CompilationMode, CUDAGraphMode

    from antiphon.services.rollout.engine.environment import EngineSettings
    from antiphon.services.rollout.engine.vllm_engine import device_arguments

    usual = device_arguments(EngineSettings(MODEL, kv_cache_bytes=5))
    assert usual == {"enforce_eager": True, "kv_cache_memory_bytes": 5}
    whole = device_arguments(EngineSettings(MODEL, memory_share=0.5, graphs="full"))
    assert not whole["enforce_eager"] and whole["gpu_memory_utilization"] == 0.5
    told = CompilationConfig(**whole["compilation_config"])
    assert told.cudagraph_mode == CUDAGraphMode.FULL and told.mode == CompilationMode.NONE
    parts = device_arguments(EngineSettings(MODEL, eager=False, graphs="piecewise"))
    told = CompilationConfig(**parts["compilation_config"])
    assert told.cudagraph_mode == CUDAGraphMode.PIECEWISE and told.mode != CompilationMode.NONE
