"""The probe of a version: planted faults must be found, honest swaps not refused, and it must cost little.

A learner takes steps on completions drawn at random, with the learning rate of the demo, and its versions go
into one engine. In each of eight faults the engine computes something else than the learner, while names,
shapes and digests are right: the packed copy of the output head stays that of the version before; so does a
matrix of one layer, drawn each time; the update of an adapter of rank 16 is left out, or added twice; two
layers are exchanged; the weights are rounded to bfloat16; the rotary base is twice as large; the experts of a
small mixture are not packed for the CPU, as vLLM 0.32 leaves them after a reload. What reads
parameters back after a load is switched off, so that only the probe speaks. `found_share` is the share of
faulty swaps that the probe refuses, `false_alarms` counts honest ones. `cost_share` is what a swap and the
step after it take longer with a probe than without, in the engine's CPU time while it samples, over one
second: the share of the tokens that it costs at one version a second. Asks for all faults found, no alarm
and a share of at most 0.02. The last line is JSON.

    .venv/bin/python benchmarks/probe.py [--honest N] [--swaps N] [--pairs N] [--record] [OVERRIDES...]
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from antiphon.api.engine import EngineRequest
from antiphon.benchmarks.parts.mixture import make_mixture
from antiphon.benchmarks.parts.results import PROJECT, benchmark_parser, execute, finish
from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import IntegrityError
from antiphon.core.records import BatchRow, FinishReason, Probe, SamplingParameters, VersionSpan
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine
from antiphon.services.learner.objective import UpdateTotals
from antiphon.services.learner.packing import make_micro_batches
from antiphon.services.rollout.engine import vllm_compat, vllm_engine
from antiphon.services.rollout.engine.environment import child_environment, prepare_environment
from antiphon.services.rollout.process import engine_settings
from antiphon.weights.snapshot import VerifiedWeights, verify

ROWS, PROMPT, COMPLETION = 8, 8, 24
"""Of a step: rows, and tokens of each."""
RANK, ADAPTER = 16, 0.01
"""Of the adapter that is merged: rank, and the size of its second matrix's entries after some steps."""
MOST_COST = 0.02
_CHILD = "ANTIPHON_BENCHMARK_CHILD"
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Version:
    """A version as it was published."""

    number: int
    tensors: Tensors
    probe: Probe | None

    def handed_over(self, tensors: Tensors | None = None, probed: bool = True) -> VerifiedWeights:
        """Return it as an engine takes it; other `tensors` go under its digest and probe."""
        found = verify(self.tensors, self.probe if probed else None)
        if tensors is not None:
            found._tensors = tensors
        return found


class Policy:
    """A learner whose every step is on completions drawn at random."""

    def __init__(self, config: RunConfig, seed: int) -> None:
        self._learner = DeepSpeedEngine(config)
        self._random, self._number = np.random.default_rng(seed), 0
        probe = self._learner.weights().probe()
        assert probe is not None
        self._vocabulary = max(probe.tokens) + 1

    @property
    def model(self) -> Any:
        """The learner's own."""
        return self._learner._engine.module.causal_model

    def step(self) -> Version:
        """Make an update and return the version."""
        rows = [self._row(place, np.zeros(COMPLETION, np.float32)) for place in range(ROWS)]
        batches = make_micro_batches(rows, 0, 10_000)
        old = [self._learner.logprobs(batch) for batch in batches]
        for batch, found in zip(batches, old, strict=True):
            batch.behaviour_logprobs.copy_(found * batch.mask)
        tokens = sum(batch.completion_tokens for batch in batches)
        self._learner.update(batches, UpdateTotals(len(rows), tokens))
        return self.published()

    def published(self) -> Version:
        """Return the weights that are held."""
        self._number += 1
        weights = self._learner.weights()
        return Version(self._number, weights.copies(), weights.probe())

    def merge(self) -> tuple[Version, Tensors]:
        """Add an adapter's update to every matrix of attention; return the version and what was added."""
        added = {}
        with torch.no_grad():
            for name, parameter in self._learner._engine.module.named_parameters():
                if "self_attn" in name and parameter.ndim == 2:
                    rows, columns = parameter.shape
                    up = torch.from_numpy(self._random.normal(0, ADAPTER, (rows, RANK))).float()
                    down = torch.from_numpy(self._random.normal(0, columns**-0.5, (RANK, columns))).float()
                    before = parameter.clone()
                    parameter += up @ down
                    added[name.removeprefix("causal_model.")] = parameter - before
        return self.published(), added

    def requests(self, count: int, tokens: int) -> list[EngineRequest]:
        """Return requests that sample until they have so many tokens."""
        drawn = self._random.integers(2, self._vocabulary, (count, PROMPT)).tolist()
        sampling = SamplingParameters(max_tokens=tokens)
        return [EngineRequest(f"r{place}", tuple(ids), place, sampling) for place, ids in enumerate(drawn)]

    def choose(self, choices: Sequence[str]) -> str:
        return choices[int(self._random.integers(len(choices)))]

    def _row(self, place: int, logprobs: Any) -> BatchRow:
        ids = self._random.integers(2, self._vocabulary, PROMPT + COMPLETION).astype(np.int32)
        return BatchRow(
            ids[PROMPT:], logprobs, (VersionSpan(0, 0, COMPLETION),), FinishReason.LENGTH,
            group_id=f"g{place // 4}", prompt_key="", sample_index=place, prompt_token_ids=ids[:PROMPT],
            reward=0.0, advantage=1.0 - 2.0 * (place % 2),
        )  # fmt: skip


@contextmanager
def head_not_packed() -> Iterator[None]:
    """Leave the head's packed copy as it was in the first load inside the block."""
    loads: list[None] = []
    repack = vllm_compat.repack_heads

    def repacked(model: Any) -> None:
        loads.append(None)
        if len(loads) > 1:  # the load with which the first one is undone
            repack(model)

    with patch.object(vllm_engine, "repack_heads", repacked):
        yield


@contextmanager
def experts_not_packed() -> Iterator[None]:
    """Leave the experts of each layer plain in the first load inside the block."""
    seen: set[int] = set()
    pack = vllm_compat.pack_experts

    def packed(method: Any, layer: Any) -> None:
        if id(layer) in seen:  # the load with which the first one is undone
            pack(method, layer)
        seen.add(id(layer))

    with patch.object(vllm_compat, "pack_experts", packed):
        yield


@contextmanager
def other_rotary_base(engine: vllm_engine.VllmEngine) -> Iterator[None]:
    """Have positions turned by another base after the first load inside the block."""
    ropes = {
        id(one.cos_sin_cache): one for one in engine._runner.get_model().modules() if hasattr(one, "base")
    }
    kept = [(one, one.cos_sin_cache.clone()) for one in ropes.values()]
    reload = engine._runner.reload_weights
    loads: list[None] = []

    def reloaded(weights_iterator: Any) -> None:
        reload(weights_iterator=weights_iterator)
        loads.append(None)
        for rope, cache in kept:
            rope.base *= 2.0 if len(loads) == 1 else 0.5
            rope.cos_sin_cache.copy_(rope._compute_cos_sin_cache() if len(loads) == 1 else cache)

    with patch.object(engine._runner, "reload_weights", reloaded):
        yield


def exchanged(tensors: Tensors) -> Tensors:
    """Return tensors in which the first two layers stand in each other's place."""
    places = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    found = dict(tensors)
    for mine, other in places.items():
        found |= {name.replace(mine, other): tensor for name, tensor in tensors.items() if mine in name}
    return found


def faulty_swap(fault: str, engine: vllm_engine.VllmEngine, policy: Policy, before: Version) -> bool:
    """Load a version with a fault over the one before it, and return whether the probe refused it."""
    version, added = policy.merge() if fault.startswith("adapter") else (policy.step(), {})
    mine = version.tensors
    within: AbstractContextManager[None] = nullcontext()
    matrices = [name for name, tensor in mine.items() if ".layers." in name and tensor.ndim == 2]
    late = policy.choose(matrices)
    handed: Mapping[str, Callable[[], Tensors]] = {
        "head_not_packed": lambda: mine,
        "tensor_of_the_version_before": lambda: mine | {late: before.tensors[late]},
        "adapter_dropped": lambda: mine | {name: mine[name] - more for name, more in added.items()},
        "adapter_twice": lambda: mine | {name: mine[name] + more for name, more in added.items()},
        "layers_exchanged": lambda: exchanged(mine),
        "bfloat16": lambda: {name: tensor.bfloat16().float() for name, tensor in mine.items()},
        "rotary_base": lambda: mine,
        "experts_not_packed": lambda: mine,
    }
    if fault == "head_not_packed":
        within = head_not_packed()
    elif fault == "experts_not_packed":
        within = experts_not_packed()
    elif fault == "rotary_base":
        within = other_rotary_base(engine)
    weights = version.handed_over(handed[fault]())
    with patch.object(vllm_engine, "check_readable", lambda model, tensors: None), within:
        try:
            engine.load_weights(version.number, weights, weights.digest)
        except IntegrityError as error:
            if "something else than the learner" in str(error) and engine.version == before.number:
                return True
            raise
    return False


FAULTS = (
    "head_not_packed",
    "tensor_of_the_version_before",
    "adapter_dropped",
    "adapter_twice",
    "layers_exchanged",
    "bfloat16",
    "rotary_base",
)
OF_MIXTURES = ("experts_not_packed",)


def started(config: RunConfig, model: Path) -> tuple[vllm_engine.VllmEngine, Policy, Version]:
    """Return an engine and a learner of a model, and the version that the engine holds."""
    settings = engine_settings(config, str(model))
    prepare_environment(settings)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
    engine, policy = vllm_engine.VllmEngine(settings), Policy(config, seed=39)
    version = policy.published()
    load(engine, version)
    return engine, policy, version


def found_faults(
    fault: str, engine: vllm_engine.VllmEngine, policy: Policy, before: Version, swaps: int
) -> tuple[int, Version]:
    """Return how many of so many swaps with a fault the probe refuses, and the version held afterwards."""
    found = 0
    for _ in range(swaps):
        found += faulty_swap(fault, engine, policy, before)
        before = policy.step()
        load(engine, before)
    print(f"{fault}: {found} of {swaps} found")
    return found, before


def load(engine: vllm_engine.VllmEngine, version: Version, probed: bool = True) -> None:
    """Swap to an honest version."""
    weights = version.handed_over(probed=probed)
    engine.load_weights(version.number, weights, weights.digest)


def cost_share(engine: vllm_engine.VllmEngine, policy: Policy, pairs: int) -> float:
    """Return the share of a second that a probe takes an engine which samples all the time."""
    took: dict[bool, list[float]] = {True: [], False: []}
    count = engine.settings.max_num_seqs
    for place in range(2 * pairs):
        if engine.unfinished < count // 2:
            engine.abort([f"r{number}" for number in range(count)])
            engine.add(policy.requests(count, 400))
        for _ in range(4):
            engine.step()
        probed = place % 2 == 0
        version = policy.published()
        weights = version.handed_over(probed=probed)
        begun = time.thread_time()
        engine.load_weights(version.number, weights, weights.digest)
        engine.step()
        took[probed].append(time.thread_time() - begun)
    engine.abort([f"r{number}" for number in range(count)])
    return median(took[True]) - median(took[False])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, check and print; return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--honest", type=int, default=1000, help="swaps without a fault")
    parser.add_argument("--swaps", type=int, default=20, help="swaps with each fault")
    parser.add_argument("--pairs", type=int, default=40, help="swaps with and without a probe")
    parser.add_argument("overrides", nargs="*", help="key=value pairs, such as model.dtype=bfloat16")
    options = parser.parse_args(arguments)
    config = load_config(PROJECT / "examples" / "quickstart.yaml", options.overrides)
    model, faults = PROJECT / config.model.path, (*FAULTS, *OF_MIXTURES)
    engine, policy, before = started(config, model)
    alarms, found = 0, dict[str, int]()
    for _ in range(options.honest):
        version = policy.step()
        try:
            load(engine, version)
            before = version
        except IntegrityError as error:
            print(error)
            alarms += 1
    for fault in FAULTS:
        found[fault], before = found_faults(fault, engine, policy, before, options.swaps)
    cost = cost_share(engine, policy, options.pairs)
    engine.close()
    with TemporaryDirectory() as folder:
        engine, policy, before = started(config, make_mixture(model, Path(folder)))
        for fault in OF_MIXTURES:
            found[fault], before = found_faults(fault, engine, policy, before, options.swaps)
        engine.close()
    result = {
        "faults": len(faults) * options.swaps,
        "found_share": sum(found.values()) / (len(faults) * options.swaps),
        "found": {fault: count / options.swaps for fault, count in found.items()},
        "honest": options.honest,
        "false_alarms": alarms,
        "cost_share": cost,
    }
    violated = [
        f"{count} of {options.swaps} swaps with {fault} were refused"
        for fault, count in found.items()
        if count < options.swaps
    ]
    violated += [f"{alarms} honest swaps were refused"] if alarms else []
    at_size = [f"cost_share is {cost:.3f}, above {MOST_COST}"] if cost > MOST_COST else []
    return finish(result, record=options.record, violated=violated, at_size=at_size)


if __name__ == "__main__":
    if _CHILD not in os.environ:
        environment = {**child_environment(1), _CHILD: "1"}
        os.execve(sys.executable, [sys.executable, str(Path(__file__)), *sys.argv[1:]], environment)
    execute(main)
