"""Bench of drafting: the engines of one model side by side in one process, and loads for them.

Sides of a comparison, an engine each: `native` samples with vLLM's own sampler in an engine built
without drafting, `keyed` with the keyed sampler in such an engine, `drafted` drafts; `plain`,
`ngram` and `suffix` are vLLM without any of our hooks. None of them knows an end token: how long each
response is was decided by a keyed engine that does.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.api.engine import Engine
from antiphon.benchmarks.parts.drafting.chain_model import ChainModel
from antiphon.benchmarks.parts.drafting.load import GroupWork, LoadRun, Side, run_load
from antiphon.benchmarks.parts.drafting.vllm_baseline import Method, PlainVllm
from antiphon.benchmarks.parts.recorded_run import RecordedRun
from antiphon.core.drafting.config import DraftingSection
from antiphon.core.records import PastCompletion, PromptHistory, SamplingParameters
from antiphon.core.seeds import derive_seed, request_seeds
from antiphon.services.rollout.engine.environment import EngineSettings
from antiphon.services.rollout.engine.vllm_engine import VllmEngine

GROUP = 8
"""Responses of a group, and of history per prompt."""

FRESH_EPOCH = 1_000_000
"""No run gets that far, so the seeds of the loads are none that history was sampled with."""

_SIZES: dict[str, Any] = {"max_num_seqs": 64, "kv_cache_bytes": 256 << 20}


@dataclass(slots=True)
class Bench:
    """The engines of one model; the weights in all of them are the same."""

    model_dir: Path
    ending: VllmEngine
    """Samples with the keyed sampler until an end token: for history, and for the lengths of the loads."""
    native: VllmEngine
    keyed: VllmEngine
    drafted: VllmEngine
    max_model_len: int
    others: dict[str, Engine] = field(default_factory=dict)

    def sides(self, names: Sequence[str], work: Sequence[GroupWork], concurrency: int) -> dict[str, Side]:
        """Return functions that begin a load on the named sides."""
        engines: dict[str, Engine] = {
            "native": self.native,
            "keyed": self.keyed,
            "drafted": self.drafted,
            **self.others,
        }
        return {name: partial(LoadRun, engines[name], work, concurrency) for name in names}

    def add(self, name: str, method: Method) -> None:
        """Start vLLM on its own beside the others."""
        self.others[name] = PlainVllm(self.model_dir, method, self.max_model_len)

    def close(self) -> None:
        """Free the engines."""
        engines: list[Engine] = [self.ending, self.native, self.keyed, self.drafted, *self.others.values()]
        for engine in engines:
            engine.close()


def open_bench(
    model_dir: Path, tensors: Mapping[str, Any], max_model_len: int, drafting: DraftingSection
) -> Bench:
    """Start four engines on a model directory and load `tensors` into all."""
    keyed = EngineSettings(model_dir=model_dir, max_model_len=max_model_len, stop_token_ids=(), **_SIZES)
    return Bench(
        model_dir,
        ending=_start(replace(keyed, stop_token_ids=None), tensors),
        native=_start(replace(keyed, sampler="native"), tensors),
        keyed=_start(keyed, tensors),
        drafted=_start(replace(keyed, draft_tokens=drafting.max_window, drafting=drafting), tensors),
        max_model_len=max_model_len,
    )


def _start(settings: EngineSettings, tensors: Mapping[str, Any]) -> VllmEngine:
    engine = VllmEngine(settings)
    serve(engine, 0, tensors)
    return engine


def serve(engine: VllmEngine, version: int, tensors: Mapping[str, Any]) -> None:
    """Load a version's weights into an engine."""
    from antiphon.weights.verified_weights import verify

    found = verify(tensors)
    engine.load_weights(version, found, found.digest)


def policy_directory(run: RecordedRun, tensors: Mapping[str, Any], folder: Path) -> Path:
    """Write a model directory with these weights, so that vLLM alone serves the same policy."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    for path in run.model_dir.glob("*.json"):
        shutil.copy(path, folder)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def greedy_work(model: ChainModel, repeats: int, prompts: int) -> list[GroupWork]:
    """Return chain prompts that were answered before, word for word, as greedy decoding does."""
    work = []
    for index in range(prompts):
        said = np.array(model.greedy(index), dtype=np.int32)
        past = PastCompletion(said, version=0, epoch=0, sample_index=0, reward=1.0)
        history = PromptHistory(f"chain-{index}", 0, (past,))
        sampling = SamplingParameters(temperature=0.0, max_tokens=len(said) + 8)
        work += [
            GroupWork(f"greedy-{index}-{n}", model.prompt(index), (0,), sampling, history)
            for n in range(repeats)
        ]
    return work


def wandering_work(model: ChainModel, bench: Bench, prompts: int, max_tokens: int) -> list[GroupWork]:
    """Return chain prompts at temperature 1 with history of the same distribution, which says little."""
    sampling = SamplingParameters(max_tokens=max_tokens)
    asked = [index % len(model.chains) for index in range(prompts)]
    earlier = [
        GroupWork(f"past-{index}", model.prompt(index), _seeds("past", index, GROUP), sampling)
        for index in sorted(set(asked))
    ]
    said = run_load(bench.ending, earlier, 64).outputs
    histories = {}
    for index in sorted(set(asked)):
        past = tuple(
            PastCompletion(said[f"past-{index}-{i}"], version=0, epoch=0, sample_index=i, reward=0.0)
            for i in range(GROUP)
        )
        histories[index] = PromptHistory(f"chain-{index}", 0, past)
    return [
        GroupWork(
            f"wander-{n}-{index}", model.prompt(index), _seeds("wander", n, 1), sampling, histories[index]
        )
        for n, index in enumerate(asked)
    ]


def sampled_work(run: RecordedRun, histories: Mapping[str, PromptHistory], prompts: int) -> list[GroupWork]:
    """Return training prompts with their history of the epoch before, under fresh seeds."""
    sampling = run.config.sampling.parameters()
    return [
        GroupWork(
            prompt.key,
            prompt.token_ids,
            request_seeds(run.config.run.seed, prompt.key, FRESH_EPOCH, GROUP),
            sampling,
            histories.get(prompt.key),
        )
        for prompt in run.prompts[:prompts]
    ]


def unseen_work(run: RecordedRun, prompts: int) -> list[GroupWork]:
    """Return held-out prompts, one request each, without history."""
    sampling = run.config.sampling.parameters()
    return [GroupWork(p.key, p.token_ids, _seeds("unseen", p.key, 1), sampling) for p in run.heldout(prompts)]


@dataclass(frozen=True, slots=True)
class RestoredHistory:
    """An epoch's completions of every training prompt, and where they come from."""

    histories: Mapping[str, PromptHistory]
    recorded: int
    """Groups read from the run's batches."""
    restored: int
    """Groups that no batch held: sampled again with their seeds under the weights of their time."""
    repeated: float
    """Share of recorded completions that came out the same when sampled again in the same way."""


def restore_history(run: RecordedRun, engine: VllmEngine, epoch: int, checked: int = 8) -> RestoredHistory:
    """Return what workers were sent as the history of `epoch`; the engine's weights are changed."""
    recorded = run.completions(epoch)
    missing = run.missing(epoch)
    found = dict(recorded)
    sampling = run.config.sampling.parameters()
    for version in sorted({group.version for group in missing}):
        serve(engine, version, run.weights(version))
        lost = [group for group in missing if group.version == version]
        work = [GroupWork(g.prompt.key, g.prompt.token_ids, g.seeds, sampling) for g in lost]
        said = run_load(engine, work, 64).outputs
        for group in lost:
            found[group.prompt.key] = tuple(
                PastCompletion(said[f"{group.prompt.key}-{i}"], version, epoch, i, 0.0)
                for i in range(len(group.seeds))
            )
    histories = {key: PromptHistory(key, epoch, past) for key, past in found.items()}
    repeated = _repeated(run, engine, epoch, recorded, checked)
    return RestoredHistory(histories, len(recorded), len(missing), repeated)


def _repeated(
    run: RecordedRun,
    engine: VllmEngine,
    epoch: int,
    recorded: Mapping[str, tuple[PastCompletion, ...]],
    checked: int,
) -> float:
    prompts = {prompt.key: prompt for prompt in run.prompts}
    sampling = run.config.sampling.parameters()
    same = total = 0
    for key, past in list(recorded.items())[:checked]:
        if len({p.version for p in past}) != 1:
            continue
        serve(engine, past[0].version, run.weights(past[0].version))
        seeds = request_seeds(run.config.run.seed, key, epoch, len(past))
        said = run_load(engine, [GroupWork(key, prompts[key].token_ids, seeds, sampling)], 64).outputs
        same += sum(said[f"{key}-{p.sample_index}"].tolist() == p.token_ids.tolist() for p in past)
        total += len(past)
    return same / total if total else 0.0


def _seeds(stream: str, name: str | int, count: int) -> tuple[int, ...]:
    return tuple(derive_seed("drafting-benchmark", stream, name, i) for i in range(count))
