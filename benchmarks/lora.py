"""Adapters: what a version costs, whether it is the same everywhere, and what the demo learns with them.

A learner takes steps on completions drawn at random, with adapters of rank 16 in all linear modules of a
model with a vocabulary of 151,936 tokens, made here (or `--model`). A version goes the way to a worker that
holds version 0: its adapter alone, merged beside an engine. `bytes_share`: payload of an adapter over that
of whole weights. `merged_digest_equal`: torch on 1 and 2 threads and numpy on 1 and 2 come to the file that
the learner wrote. `logprob_difference`: largest of the engine's from the learner's, over random texts, in
nats and float32.

Then the demo runs with adapters for `--seeds` seeds; `pass_gap` is how far the mean of its last three
held-out scores is below that of all weights, as benchmarks/results/demo.json has it. Asks for at most 0.02,
equality, at most 1e-4 and at most 0.03. The last line is JSON.

    .venv/bin/python benchmarks/lora.py [--versions N] [--seeds N] [--model FOLDER] [--record]
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antiphon.api.manifest import full_payload
from antiphon.benchmarks.parts.results import PROJECT, RESULTS, add, benchmark_parser, execute, finish, read
from antiphon.core.config import RunConfig, build_config
from antiphon.core.records import BatchRow, FinishReason, SnapshotManifest, VersionSpan
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine
from antiphon.services.learner.objective import UpdateTotals
from antiphon.services.learner.packing import make_micro_batches, probe_batch
from antiphon.services.learner.publish import SnapshotPublisher
from antiphon.services.rollout.engine.environment import (
    EngineSettings,
    child_environment,
    prepare_environment,
)
from antiphon.weights.patch_payloads import restore_full
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import open_snapshot

RANK, VOCABULARY, HIDDEN, LAYERS = 16, 151_936, 256, 4
ROWS, PROMPT, COMPLETION = 8, 8, 24
"""Of a step: rows, and tokens of each."""
TEXTS, TEXT = 4, 48
"""Scored under each version, and tokens of each."""
RATE = 2e-3
"""Of the demo with adapters: ten times what all its weights have."""
LIMITS = {"bytes_share": 0.02, "logprob_difference": 1e-4, "pass_gap": 0.03}
_CHILD = "ANTIPHON_BENCHMARK_CHILD"


def make_model(folder: Path) -> Path:
    """Save a thin Qwen3 with the vocabulary of the real ones; weights are drawn at random."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(39)
    shape = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    return folder


def rows(random: np.random.Generator, vocabulary: int) -> list[BatchRow]:
    """Return rows of a step."""
    drawn = random.integers(2, vocabulary, (ROWS, PROMPT + COMPLETION)).astype(np.int32)
    return [
        BatchRow(
            ids[PROMPT:], np.full(COMPLETION, -np.log(vocabulary), np.float32),
            (VersionSpan(0, 0, COMPLETION),), FinishReason.LENGTH,
            group_id=f"g{place // 4}", prompt_key="", sample_index=place, prompt_token_ids=ids[:PROMPT],
            reward=0.0, advantage=1.0 - 2.0 * (place % 2),
        )
        for place, ids in enumerate(drawn)
    ]  # fmt: skip


def publish(
    config: RunConfig, folder: Path, versions: int
) -> tuple[PayloadStore, list[SnapshotManifest], list[tuple[tuple[int, ...], np.ndarray[Any, Any]]], bool]:
    """Train and publish versions.

    Return the store, the manifests, texts with the last version's logprobs of them, and whether weights
    have the same digest with two threads as with one.
    """
    learner, random = DeepSpeedEngine(config), np.random.default_rng(39)
    probe = learner.weights().probe()
    assert probe is not None
    vocabulary, store = max(probe.tokens) + 1, PayloadStore(folder)
    publisher, manifests, equal = SnapshotPublisher("lora", store, None, versions + 1), [], True
    for version in range(versions + 1):
        if version:
            batches = make_micro_batches(rows(random, vocabulary), 0, 10_000)
            tokens = sum(batch.completion_tokens for batch in batches)
            learner.update(batches, UpdateTotals(ROWS, tokens))
        weights = learner.weights()
        digest = publisher.write(version, weights, lambda length: None)
        torch.set_num_threads(2)
        equal &= weights.digest() == digest
        torch.set_num_threads(config.learner.threads)
        manifests.append(publisher.manifest(version, "origin:1"))
    texts = [tuple(random.integers(2, vocabulary, TEXT).tolist()) for _ in range(TEXTS)]
    scored = [(text, learner.logprobs(probe_batch(text), 1.0)[0].numpy()) for text in texts]
    learner.close()
    return store, manifests, scored, equal


def merged_equal(store: PayloadStore, manifest: SnapshotManifest, folder: Path, threads: int) -> PayloadStore:
    """Return the store of a worker that had version 0 and took an adapter.

    Raises:
        IntegrityError: when it makes other bytes than the learner wrote.
    """
    worker, base = PayloadStore(folder), store.manifest(0)
    folder.mkdir()
    worker.adopt(full_payload(base), store.path(full_payload(base).digest))
    (adapter,) = (one for one in manifest.payloads if one.encoding == "lora")
    worker.adopt(adapter, store.path(adapter.digest))
    restore_full(worker, manifest, adapter, base, threads)
    return worker


def measure(model: Path, folder: Path, versions: int) -> dict[str, Any]:
    """Return the figures of versions on their way from a learner to an engine."""
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    learner = {"learning_rate": RATE, "warmup_steps": 0, "lora": {"rank": RANK}}
    config = build_config({"model": {"path": str(model)}, "learner": learner})
    store, manifests, scored, equal = publish(config, folder / "learner", versions)
    newest = manifests[-1]
    stores = [merged_equal(store, newest, folder / f"worker-{threads}", threads) for threads in (1, 2)]
    engine = VllmEngine(EngineSettings(model, max_num_seqs=8, kv_cache_bytes=64 << 20, stop_token_ids=(1,)))
    opened = open_snapshot(newest, stores[0])
    engine.load_weights(newest.version, opened, opened.digest)
    apart = 0.0
    for text, learned in scored:
        places = torch.tensor(text[1:]).unsqueeze(-1)
        found = engine._scores(text).gather(-1, places).squeeze(-1)
        apart = max(apart, float(np.abs(found.cpu().numpy() - learned).max()))
    engine.close()
    full, adapter = (payload.payload_bytes for payload in newest.payloads)
    return {
        "full_bytes": full,
        "adapter_bytes": adapter,
        "bytes_share": adapter / full,
        "logprob_difference": apart,
        "merged_digest_equal": equal and opened.digest == newest.weights_digest,
    }


def demo(seeds: int) -> tuple[dict[str, list[float]], float]:
    """Run the demo with adapters; return its figures, and its score's distance from that of all weights."""
    from antiphon.benchmarks import demo as whole
    from antiphon.benchmarks.parts.measure import run_job, scratch_home

    samples: dict[str, list[float]] = {}
    for seed in range(seeds):
        words = [f"run.seed={seed}", f"learner.lora.rank={RANK}", f"learner.learning_rate={RATE}"]
        with scratch_home() as home:
            found = whole.measured(run_job(home, whole.CONFIG, words, "lora", whole.RUN_S), home)
        print(f"seed {seed}: {found}", flush=True)
        add(samples, {name: found[name] for name in ("pass_after", "pass_last_three")})
    kept = read(RESULTS)["demo"].result["samples"]["pass_last_three"]
    return samples, float(np.mean(kept) - np.mean(samples["pass_last_three"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, check and print; return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--versions", type=int, default=4, help="versions after the base")
    parser.add_argument("--seeds", type=int, default=3, help="of the demo; 0 leaves it out")
    parser.add_argument("--model", type=Path, default=None, help="folder of another model")
    options = parser.parse_args(arguments)
    prepare_environment(EngineSettings(PROJECT))
    with tempfile.TemporaryDirectory(prefix="antiphon-lora-") as name:
        folder = Path(name)
        model = options.model or make_model(folder / "model")
        result = measure(model, folder, options.versions)
    samples: dict[str, list[float]] = {}
    if options.seeds:
        samples, result["pass_gap"] = demo(options.seeds)
    violated = [
        f"{figure} is {result[figure]:.2g}, above {most:g}"
        for figure, most in LIMITS.items()
        if not result.get(figure, 0.0) <= most
    ]
    violated += [] if result["merged_digest_equal"] else ["the merged weights are not the same everywhere"]
    return finish(result, record=options.record, samples=samples, violated=violated)


if __name__ == "__main__":
    if _CHILD not in os.environ:
        environment = {**child_environment(1), _CHILD: "1"}
        os.execve(sys.executable, [sys.executable, str(Path(__file__)), *sys.argv[1:]], environment)
    execute(main)
