"""Memory: what ranks and engines hold of a model, before any of them is started.

Of P parameters, of which Q are trained, on N ranks, with w bytes each while computing (2 in bfloat16), a rank
holds, in bytes (Rajbhandari et al. 2020, "ZeRO", with DeepSpeed's own copies):

| stage | weights | gradients | AdamW's moments and master copy |
|-------|---------|-----------|---------------------------------|
| 0     | wP      | 4Q        | 8Q                              |
| 1     | wP      | 4Q        | 12Q/N                           |
| 2     | wP      | 4Q/N      | 12Q/N                           |
| 3     | wP/N    | 4Q/N      | 12Q/N                           |

and gradients on their way: in a bucket while ranks reduce them; for the update, when activations are gone, in
one piece. That is exact, and is compared with what a rank holds when it holds most. While it computes there
are besides, by estimate: activations, logits and the head's gradient, and at stage 3 the weights that are
whole for the moment.
"""

import json
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate, product

from antiphon.core.capacity.model_shape import (
    ModelShape,
    Tensors,
    adapter_tensors,
    count,
    frozen_names,
)
from antiphon.core.config import RunConfig
from antiphon.core.config_sections import LearnerSection
from antiphon.core.errors import InfeasibleError

MOST_BUCKET = 50_000_000
"""Parameters that ranks reduce or fetch at once."""
MOST_KEPT_WHOLE = 100_000
"""Parameters of a tensor that every rank may keep whole at stage 3, as norms are."""
MOST_PROPOSED = 64
"""Ranks that are proposed at most."""
MOST_LOGITS = 2048 * 4096
"""That a rank holds at once: liger-kernel computes the loss in pieces of 2048 positions and 4096 tokens."""
MOST_LIVE = 1_000_000_000
"""Parameters that stage 3 keeps whole, and those that it updates, at a time: DeepSpeed's defaults."""
PROCESS_BYTES = 1e9
"""Libraries of a rank or an engine, or its CUDA context, by estimate."""
ADAPTER_RANK = 16
"""Of the adapter that is proposed where a model does not fit."""


def trained_tensors(learner: LearnerSection, tensors: Tensors) -> Tensors | None:
    """Return what a configuration trains, an adapter or a part of the model; None where it is all of it."""
    lora = learner.lora
    if lora.rank:
        return adapter_tensors(tensors, lora.rank, lora.targets)
    frozen = frozen_names(tensors, learner.freeze)
    return {name: shape for name, shape in tensors.items() if name not in frozen} if frozen else None


def trained_parameters(learner: LearnerSection, tensors: Tensors) -> int:
    """Return how many parameters a configuration trains, and a checkpoint holds."""
    chosen = trained_tensors(learner, tensors)
    return count(tensors if chosen is None else chosen)


def bucket_parameters(parameters: int) -> int:
    """Return the parameters of a bucket: the usual ones take 2 GB of every rank, however small the model."""
    return min(max(parameters, 1), MOST_BUCKET)


def whole_parameters(parameters: int) -> int:
    """Return how many parameters a tensor may have that stage 3 keeps whole."""
    return min(parameters // 100, MOST_KEPT_WHOLE)


def held_by_rank(
    tensors: Tensors, learner: LearnerSection, adapter: Tensors | None = None
) -> dict[str, float]:
    """Return the bytes that one rank holds at most, by use, besides what it computes.

    Args:
        tensors: of the model.
        learner: its section of the configuration.
        adapter: what is trained instead of the whole model; None trains all of it.
    """
    stage, ranks = learner.stage, learner.ranks
    width = 2 if learner.dtype == "bfloat16" else 4
    everything, chosen = {**tensors, **(adapter or {})}, tensors if adapter is None else adapter
    total, trained = count(everything), count(chosen)
    held = {"weights": float(width * total), "gradients": 4.0 * trained, "optimizer": 8.0 * trained}
    if not stage:
        return held
    part, bucket = 4.0 * trained / ranks, float(width * bucket_parameters(trained))
    held["optimizer"] = 3 * part
    moving, update = bucket, 0.0
    if stage == 1 and width == 2:  # all at once: as computed, then as sent besides
        moving = update = 2.0 * trained
    elif stage == 1:
        update = max(0.0, part - bucket)
    elif stage == 2:  # a bucket is copied; then, in float32, a part besides the sum's, each of whole tensors
        held["gradients"] = part if width == 2 else 4.0 * _touched(chosen, ranks)
        moving += bucket if width == 2 else max(bucket, held["gradients"])
    else:
        small = sum(n for n in map(math.prod, everything.values()) if n <= whole_parameters(count(tensors)))
        kept = width * small if ranks > 1 else 0.0
        held["weights"] = held["weights"] / ranks + kept
        # Small tensors are parted too while there is an update.
        held["gradients"], update = part, max(0.0, min(part, 4.0 * MOST_LIVE) - kept)
    return held | {"gradients on their way": moving, "update": update}


def _touched(tensors: Tensors, ranks: int) -> int:
    """Return the parameters of all tensors that one rank's part touches, of the rank with most."""
    stops = list(accumulate(map(math.prod, tensors.values()), initial=0))
    part = max(1, -(-stops[-1] // ranks))
    ends = [bisect_left(stops, min(part * (rank + 1), stops[-1])) for rank in range(ranks)]
    return max(stops[end] - stops[bisect_right(stops, part * rank) - 1] for rank, end in enumerate(ends))


def used_by_rank(
    tensors: Tensors, shape: ModelShape, learner: LearnerSection, adapter: Tensors | None = None
) -> dict[str, float]:
    """Return the bytes that a rank needs besides while it computes, by estimate."""
    width = 2 if learner.dtype == "bfloat16" else 4
    queries, cached = shape.heads * shape.head_size, shape.cached_heads * shape.head_size
    # Inputs of each operation, kept for the backward pass: norms (in float32 too), attention, dense block.
    layer = width * (4 * shape.hidden + 3 * queries + 4 * cached)
    layer += 8 * shape.hidden + 4 * width * shape.intermediate * shape.experts_used
    recomputed = learner.gradient_checkpointing
    positions = learner.micro_batch_tokens
    kept = shape.layers * width * shape.hidden + layer if recomputed else shape.layers * layer
    logits = min(positions * shape.vocabulary, MOST_LOGITS) * (width + 16)
    if not learner.lora.rank:  # the head's gradient, in float32 and as handed on, where nothing holds all
        logits += (6 if width == 2 and learner.stage > 1 else 4) * shape.vocabulary * shape.hidden
    used = {"activations": float(positions * kept), "logits": float(logits), "process": PROCESS_BYTES}
    if learner.stage == 3 and learner.ranks > 1:
        used["whole layers"] = float(width * min(count({**tensors, **(adapter or {})}), MOST_LIVE))
    return used


def held_by_engine(tensors: Tensors, config: RunConfig) -> dict[str, float]:
    """Return the bytes that each process of an engine holds: its part of the weights, and its cache."""
    width, parts = 2 if config.model.dtype == "bfloat16" else 4, config.rollout.tensor_parallel
    cache = float(config.rollout.kv_cache_mib << 20)
    return {"weights": float(width * count(tensors) / parts), "cache": cache}


def used_by_engine(shape: ModelShape, config: RunConfig) -> dict[str, float]:
    """Return the bytes that an engine needs besides, by estimate."""
    rollout, width = config.rollout, 2 if config.model.dtype == "bfloat16" else 4
    rows = rollout.concurrent_groups * config.loop.group_size
    rows *= 1 + (config.drafting.max_window if config.drafting.enabled else 0)
    tokens = max(2048, rollout.max_model_tokens, rows)
    return {
        "activations": float(
            tokens * width * (4 * shape.hidden + 4 * shape.intermediate * shape.experts_used)
        ),
        "logits": float(rows * shape.vocabulary * 8),
        "process": PROCESS_BYTES,
    }


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use, of each process of a run."""

    rank: dict[str, float]
    engine: dict[str, float]
    ranks: int
    engines: int
    """Processes of engines on this machine."""
    apart: bool
    """Each process has a GPU of its own: one of learner and engines takes several (`core.devices`)."""
    snapshot: float
    """Of one version on the disk."""
    transfer: float
    """Of one version to a worker that has version 0."""
    checkpoint: float

    def fullest(self, gpus: bool) -> float:
        """Return the bytes of the fullest place.

        That is the GPU of one process, or the only one, which all share; else the machine, which has all.
        """
        rank, engine = sum(self.rank.values()), sum(self.engine.values())
        if gpus and self.apart:
            return max(rank, engine if self.engines else 0.0)
        return self.ranks * rank + self.engines * engine


def plan_memory(config: RunConfig, tensors: Tensors, shape: ModelShape | None) -> MemoryPlan:
    """Return what a run of this configuration needs.

    Args:
        config: of the run.
        tensors: of its model.
        shape: what it computes with; None leaves out all that is estimated.
    """
    learner = config.learner
    adapter, trained = trained_tensors(learner, tensors), trained_parameters(learner, tensors)
    rank, engine = held_by_rank(tensors, learner, adapter), held_by_engine(tensors, config)
    if shape is not None:
        rank |= used_by_rank(tensors, shape, learner, adapter)
        rank["update"] = max(0.0, rank.get("update", 0.0) - rank["activations"] - rank["logits"])
        engine |= used_by_engine(shape, config)
    if learner.lora.rank and learner.stage == 3 and learner.ranks > 1:
        # Each loads all of the model before the engine divides it.
        whole = (2 if learner.dtype == "bfloat16" else 4) * count(tensors) + rank.get("process", 0.0)
        rank["loading"] = max(0.0, whole - sum(rank.values()))
    # A version of adapters is the whole policy, and they.
    published = 2.0 if config.model.dtype == "bfloat16" else 4.0
    if config.scores_earlier:
        rank["earlier policy"] = published * count(tensors)
    # Of a checkpoint: the weights as they compute, two moments, and a master copy where there is one.
    width = 14 if learner.dtype == "bfloat16" else 16 if 0 < learner.stage < 3 else 12
    return MemoryPlan(
        rank,
        engine,
        learner.ranks,
        config.rollout.workers * config.rollout.tensor_parallel,
        max(learner.ranks, config.rollout.tensor_parallel) > 1,
        published * count({**tensors, **(adapter or {})}),
        published * (trained if learner.lora.rank else count(tensors)),
        float(width * trained),
    )


def check_memory(
    config: RunConfig, tensors: Tensors, shape: ModelShape | None, memory: float, gpus: bool
) -> None:
    """Check that a run fits into the fullest place; arguments as for `plan_memory`.

    Args:
        config: of the run.
        tensors: of its model.
        shape: what it computes with; None checks what is certain alone.
        memory: of a GPU or of this machine, bytes.
        gpus: each rank has a GPU of its own.

    Raises:
        InfeasibleError: naming the three cheapest changes that need less.
    """
    needed = plan_memory(config, tensors, shape).fullest(gpus)
    if needed <= memory:
        return
    changes = proposals(config, tensors, shape, memory, gpus)
    listed = "; ".join(f"{words} ({size / 1e9:,.1f} GB)" for words, size in changes)
    raise InfeasibleError(
        f"{needed / 1e9:,.1f} GB are needed on {'a GPU' if gpus else 'this machine'}, which has "
        f"{memory / 1e9:,.1f} GB; {f'less is needed with {listed}' if listed else 'use a smaller model'}"
    )


def proposals(
    config: RunConfig, tensors: Tensors, shape: ModelShape | None, memory: float, gpus: bool
) -> list[tuple[str, float]]:
    """Return the three cheapest changes that fit, each with the bytes of the fullest place then.

    Fewer GPUs are cheaper than more, then to train all of the model, then no activation computed twice, then
    what ranks say to each other; none of them contains another. Further ranks help only where each has a GPU
    of its own. Where nothing fits, it is what needs least.
    """
    learner = config.learner
    most = max(learner.ranks, MOST_PROPOSED if gpus else 1)
    all_ranks = [ranks for ranks in (learner.ranks << power for power in range(10)) if ranks <= most]
    again = [False] if learner.gradient_checkpointing else [False, True]
    found: list[tuple[tuple[int, ...], str, float]] = []
    for ranks, adapts, recomputes in product(
        all_ranks, [False] if learner.lora.rank else [False, True], again
    ):
        for stage in [learner.zero_stage, *(range(learner.stage + 1, 4) if ranks > 1 else ())]:
            values = {"ranks": ranks, "zero_stage": stage}
            values |= {"gradient_checkpointing": True} if recomputes else {}
            lora = learner.lora.model_copy(update={"rank": ADAPTER_RANK}) if adapts else learner.lora
            changed = learner.model_copy(update={**values, "lora": lora})
            made = plan_memory(config.model_copy(update={"learner": changed}), tensors, shape)
            words = [f"learner.lora.rank={ADAPTER_RANK}"] if adapts else []
            words += [
                f"learner.{name}={json.dumps(value)}"
                for name, value in values.items()
                if value != getattr(learner, name)
            ]
            found.append(((ranks, adapts, recomputes, stage), " ".join(words), made.fullest(gpus)))
    chosen: list[tuple[tuple[int, ...], str, float]] = []
    for one in found:
        contains = any(
            all(less <= more for less, more in zip(other[0], one[0], strict=True)) for other in chosen
        )
        if one[2] <= memory and not contains:
            chosen.append(one)
    least = chosen or sorted(found[1:], key=lambda one: one[2])
    return [(words, size) for _, words, size in least[:3]]
