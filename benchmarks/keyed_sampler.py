"""Keyed against native sampling in one engine, without drafts: the price of replayable tokens.

Runs alternating pairs of the same load under both samplers at several concurrencies and prints
the ratio of tokens per CPU-second (keyed / native, median over pairs; processed log-probabilities
are kept by both), then the engine's throughput, start-up time and memory. The last line is JSON.

    .venv/bin/python benchmarks/keyed_sampler.py [--model DIR] [--pairs N]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from antiphon.api.engine import Engine, EngineRequest
from antiphon.core.records import SamplingParameters
from antiphon.services.rollout.engine.environment import EngineSettings, child_environment

CONCURRENCIES = (4, 16, 64)
THROUGHPUT = (64, 128, 256)
TOKENS = {4: 2_000, 16: 6_000, 64: 12_000, 128: 24_000, 256: 32_000}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory; a random 0.45M Qwen3 by default")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--runs", type=int, default=3, help="of each throughput (default 3)")
    arguments = parser.parse_args()
    if "ANTIPHON_BENCHMARK_CHILD" not in os.environ:
        # OpenMP reads its settings when a process starts.
        os.execve(
            sys.executable,
            [sys.executable, *sys.argv],
            {**child_environment(1), "ANTIPHON_BENCHMARK_CHILD": "1"},
        )
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments.model or random_model(Path(folder)), arguments.pairs, arguments.runs)
    print(json.dumps(result))


def measure(model_dir: Path, pairs: int, runs: int) -> dict[str, object]:
    """Return ratios by concurrency, tokens per CPU-second, start-up seconds and resident memory."""
    import psutil
    from safetensors.torch import load_file

    started = time.perf_counter()
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine
    from antiphon.weights.verified_weights import verify

    engine = VllmEngine(
        EngineSettings(
            model_dir=model_dir,
            max_num_seqs=max(THROUGHPUT),
            kv_cache_bytes=256 << 20,
            stop_token_ids=(),  # lengths are set by the load, so both samplers do the same work
        )
    )
    tensors = {k: v for file in sorted(model_dir.glob("*.safetensors")) for k, v in load_file(file).items()}
    found = verify(tensors)
    engine.load_weights(0, found, found.digest)
    start_s = time.perf_counter() - started
    rates: dict[str, dict[int, list[float]]] = {"keyed": {}, "native": {}}
    for concurrency in CONCURRENCIES:
        for sampler in rates:  # the first run of each shape is not counted
            engine.use_sampler(sampler)
            run_load(engine, engine.vocabulary_size, concurrency, TOKENS[concurrency] // 4)
        for pair in range(pairs):
            for sampler in ("keyed", "native") if pair % 2 else ("native", "keyed"):
                engine.use_sampler(sampler)
                rate = run_load(engine, engine.vocabulary_size, concurrency, TOKENS[concurrency])
                rates[sampler].setdefault(concurrency, []).append(rate)
    ratios = {
        c: statistics.median(k / n for k, n in zip(rates["keyed"][c], rates["native"][c], strict=True))
        for c in CONCURRENCIES
    }
    for c in CONCURRENCIES:
        keyed, native = (statistics.median(rates[s][c]) for s in ("keyed", "native"))
        print(
            f"concurrency {c:3d}: keyed {keyed:6.0f}, native {native:6.0f} tokens/CPU-s, "
            f"ratio {ratios[c]:.3f}"
        )
    engine.use_sampler("keyed")
    throughput = {}
    for c in THROUGHPUT:
        throughput[c] = statistics.median(
            run_load(engine, engine.vocabulary_size, c, TOKENS[c]) for _ in range(runs)
        )
        print(f"concurrency {c:3d}: {throughput[c]:6.0f} tokens/CPU-s keyed")
    rss = psutil.Process().memory_info().rss
    engine.close()
    return {
        "ratio": {str(c): round(r, 3) for c, r in ratios.items()},
        "ratio_min": round(min(ratios.values()), 3),
        "tokens_per_cpu_s": {str(c): round(r) for c, r in throughput.items()},
        "start_s": round(start_s, 1),
        "rss_mib": rss >> 20,
        "pairs": pairs,
    }


def run_load(engine: Engine, vocabulary: int, concurrency: int, tokens: int) -> float:
    """Keep `concurrency` requests of 16 to 80 tokens in flight; return tokens per CPU-second."""
    rng = np.random.default_rng(concurrency)
    waiting: list[EngineRequest] = []
    while tokens > 0:
        length = int(rng.integers(16, 81))
        prompt = tuple(int(t) for t in rng.integers(3, vocabulary, 20))
        waiting.append(
            EngineRequest(
                str(len(waiting)), prompt, int(rng.integers(2**62)), SamplingParameters(max_tokens=length)
            )
        )
        tokens -= length
    done = 0
    begun = time.process_time()
    while waiting or engine.unfinished:
        room = concurrency - engine.unfinished
        if room > 0 and waiting:
            engine.add(waiting[:room])
            del waiting[:room]
        done += sum(len(output.token_ids) for output in engine.step())
    return done / (time.process_time() - begun)


def random_model(folder: Path) -> Path:
    """Write the demo's architecture with random weights (0.45M parameters, 64 tokens)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
