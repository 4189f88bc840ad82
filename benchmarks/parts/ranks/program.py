"""A rank of the benchmark: trains made-up batches with the learner's own code, and notes what it finds.

python -m antiphon.benchmarks.parts.ranks.program cells FOLDER     one group after the other, by cells.json
python -m antiphon.benchmarks.parts.ranks.program train FOLDER     one run, which goes on where it was
python -m antiphon.benchmarks.parts.ranks.program load FOLDER      a model, and no step
"""

import gc
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
from torch import distributed

from antiphon.benchmarks.parts.results import PROJECT
from antiphon.core.config import RunConfig, build_config
from antiphon.core.digests import digest_bytes
from antiphon.core.ranks.memory import held_by_rank, trained_tensors
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.lineage.rollout_table import encode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine, pin_numerics
from antiphon.services.learner.policy import load_causal_model
from antiphon.services.learner.ranks.group import Ranks, join
from antiphon.services.learner.step import Trainer
from antiphon.system import failpoints
from antiphon.system.processes import tie_to_parent
from antiphon.system.rank_places import MEETING

MODEL = PROJECT / "examples" / "models" / "chain-sum"
KILL = "ANTIPHON_KILL"
"""RANK PLACE VISITS: which rank dies in this start, and where; empty for none."""
STEPS = 5
SAVED = 3
"""Steps of a cell, and the version whose checkpoint another start goes on from."""


def config_of(cell: dict[str, Any]) -> RunConfig:
    """Return the configuration of a cell: model, ranks, stage, objective, dtype, threads and adapters."""
    learner = {
        "ranks": cell["ranks"],
        "zero_stage": cell["stage"],
        "dtype": cell["dtype"],
        "threads": cell["threads"],
        "gradient_clip": cell["clip"],
        "warmup_steps": 0,
        "micro_batch_tokens": cell["tokens"],
        "checkpoint_interval": 2,
        "lora": {"rank": cell["lora"]},
    }
    return build_config(
        {
            "run": {"steps": 1000},
            "model": {"path": cell.get("model", str(MODEL))},
            "learner": learner,
            "algorithm": {"objective": cell["objective"]},
        }
    )


def rows_of(step: int, groups: int = 6) -> list[BatchRow]:
    """Return a step's batch: groups of eight, completions of 5 to 60 tokens."""
    rng, rows = np.random.default_rng(step), []
    for place in range(8 * groups):
        if place % 8 == 0:
            prompt = rng.integers(0, 60, 12).astype(np.int32)
        length = int(rng.integers(5, 60))
        rows.append(
            BatchRow(
                rng.integers(0, 60, length).astype(np.int32),
                rng.uniform(-4.3, -3.9, length).astype(np.float32),
                (VersionSpan(step, 0, length),),
                FinishReason.STOP,
                group_id=f"g{place // 8:03d}",
                prompt_key="p",
                sample_index=place % 8,
                prompt_token_ids=prompt,
                reward=1.0,
                advantage=float(rng.standard_normal()),
            )
        )
    return rows


class NotingEngine(DeepSpeedEngine):
    """Keeps the gradient of its first update, as Adam took it in, and the most bytes held in one."""

    gradient: torch.Tensor | None = None
    held = 0
    _updates = 0

    def __init__(self, config: RunConfig) -> None:
        gc.collect()
        self._before = counted_bytes()
        super().__init__(config)

    def update(self, *args: Any, **named: Any) -> float:
        self._updates += 1
        if self._updates != 2:  # moments are there from the second on, and counting takes time
            return super().update(*args, **named)
        from deepspeed import comm

        # Most is held while gradients are reduced, or when AdamW takes them in one piece.
        with self._counted(comm, "all_reduce"), self._counted(self._optimizer, "step"):
            return super().update(*args, **named)

    @contextmanager
    def _counted(self, owner: Any, name: str) -> Iterator[None]:
        work = getattr(owner, name)

        def counting(*args: Any, **named: Any) -> Any:
            noted = 0 if self.gradient is None else self.gradient.nbytes
            self.held = max(self.held, counted_bytes() - self._before - noted)
            return work(*args, **named)

        with patch.object(owner, name, counting):
            yield

    def _apply(self) -> float:
        norm = super()._apply()
        if self.gradient is None:
            self.gradient = self.first_moments() / (1 - self._optimizer.param_groups[0]["betas"][0])
        return norm

    def first_moments(self) -> torch.Tensor:
        """Return Adam's first moments, all in one, float64; on every rank, since parts are fetched."""
        from deepspeed.utils import safe_get_full_optimizer_state

        state, found = self._engine.optimizer, []
        for parameter in self._engine.module.parameters():
            if not parameter.requires_grad:
                continue
            one = state.state[parameter]["exp_avg"] if self._stage == 0 else None
            found.append(safe_get_full_optimizer_state(parameter, "exp_avg") if one is None else one)
        return torch.cat([one.detach().double().flatten().cpu() for one in found])


def counted_bytes() -> int:
    """Return the bytes of all tensors of this process but activations, each memory once."""
    found = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.device.type == "cpu" and one.grad_fn is None:
            for tensor in (one, one.grad if one.is_leaf else None):
                if tensor is not None:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


class WholeEngine(DeepSpeedEngine):
    """Loads the model whole on each rank, as below stage 3."""

    def _load(self, config: RunConfig) -> Any:
        return load_causal_model(config.model.path, torch.float32, gradient_checkpointing=False)


def load(folder: Path) -> None:
    """Load the model in `folder` at stage 3, whole first if told so, and note the most memory it took."""
    told = json.loads((folder / "load.json").read_text())
    config = build_config(
        {"model": {"path": str(folder / "model")}, "learner": {"ranks": told["ranks"], "zero_stage": 3}}
    )
    pin_numerics(1)
    kind = WholeEngine if told["whole"] else DeepSpeedEngine
    peaks: list[int] = []

    class Measured(kind):  # type: ignore[misc, valid-type]
        def _load(self, config: RunConfig) -> Any:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # its highest mark begins at what it has now
            before = psutil.Process().memory_info().rss
            model = super()._load(config)
            mark = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
            assert mark is not None
            peaks.append(1024 * int(mark[1]) - before)
            return model

    ranks = Measured(config)._ranks
    gc.collect()
    ranks.close()
    (folder / f"peak-{os.environ['RANK']}").write_text(str(peaks[0]))


def cells(folder: Path) -> None:
    """Train each cell of cells.json in a group of its own, and write what rank 0 finds."""
    for number, cell in enumerate(json.loads((folder / "cells.json").read_text())):
        os.environ[MEETING] = str(folder / f"meeting-{number}")
        config = config_of(cell)
        pin_numerics(config.learner.threads)
        made: list[NotingEngine] = []

        def make(config: RunConfig, made: list[NotingEngine] = made) -> NotingEngine:
            made.append(NotingEngine(config))
            return made[-1]

        store = ArtifactStore(folder / "store")
        trainer = Trainer(config, CheckpointStore(folder / f"checkpoints-{number}", 9), make)
        trainer.ranks = join(config)
        spent = timed(trainer.ranks)
        if int(os.environ["RANK"]):
            trainer.follow(store.get)
            continue
        held = trainer.start(0)
        spent.clear()
        seconds, digests, norm = [], [], 0.0
        for step in range(STEPS):
            payload = encode_batch(rows_of(step, cell["groups"]))
            store.put(payload)
            begun = time.perf_counter()
            held = trainer.train(step, payload)
            seconds.append(time.perf_counter() - begun)
            norm = norm or held.metrics["gradient_norm"]
            digests.append(held.weights.digest())
            if held.version == SAVED and cell["again"]:
                trainer.save()
            if held.version < STEPS:
                del held  # with adapters it has copies of them
        control = sum(spent) / sum(seconds)
        tensors = held.weights.copies()
        weights = torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        tensors.clear()
        gradient, same = made[0].gradient, True
        for first in (SAVED, 0) if cell["again"] else ():
            held = trainer.start(first)
            for step in range(held.version, STEPS):
                held = trainer.train(step, encode_batch(rows_of(step, cell["groups"])))
                same &= held.weights.digest() == digests[step]
        trainer.stop()
        planned = held_by_rank(shapes, config.learner, trained_tensors(config.learner, shapes))
        torch.save(
            {
                "cell": cell,
                "gradient": gradient,
                "norm": norm,
                "weights": weights,
                "same": same,
                "seconds": seconds,
                "control_share": control,
                "memory_over_formula": made[0].held / sum(planned.values()),
            },
            folder / f"found-{number}.pt",
        )
        made.clear()
        del trainer, held, weights, gradient  # the next cell counts what there is


def timed(ranks: Ranks) -> list[float]:
    """Have the seconds that orders and figures take added to a list, without waits for a rank's own work."""
    spent: list[float] = []
    order, collect = ranks.order, ranks.collect

    def timing(call: Any, *args: Any) -> Any:
        begun = time.perf_counter()
        found = call(*args)
        spent.append(time.perf_counter() - begun)
        return found

    def together(*args: Any) -> Any:
        if ranks.world > 1:
            distributed.barrier(ranks._orders)
        return timing(collect, *args)

    ranks.order, ranks.collect = partial(timing, order), together  # type: ignore[method-assign, assignment]
    return spent


def train(folder: Path) -> None:
    """Train one run to its end, noting each version's digest; this start's kill happens on the way."""
    tie_to_parent()
    rank, place, visits = (os.environ.get(KILL) or "-1 - 0").split()
    if rank == os.environ["RANK"]:
        failpoints.arm({failpoints.VARIABLE: f"{place}:{visits}"})
    told = json.loads((folder / "run.json").read_text())
    config, store = config_of(told["cell"]), ArtifactStore(folder / "store")
    pin_numerics(config.learner.threads)
    trainer = Trainer(config, CheckpointStore(folder / "checkpoints", 2))
    if int(os.environ["RANK"]):
        trainer.ranks = join(config)
        trainer.follow(store.get)
        return

    def note(version: int, digest: str) -> None:
        with (folder / "digests").open("a") as log:
            log.write(f"{version} {digest}\n")

    held = trainer.start(told["steps"])
    note(held.version, held.weights.digest())
    while held.version < told["steps"]:
        payload = encode_batch(rows_of(held.version, 2))
        assert store.put(payload) == digest_bytes(payload)
        held = trainer.train(held.version, payload)
        failpoints.reach("learner.commit.before")
        note(held.version, held.weights.digest())
        if held.version % config.learner.checkpoint_interval == 0:
            trainer.save()
    trainer.stop()
    (folder / "done").touch()


if __name__ == "__main__":
    {"cells": cells, "train": train, "load": load}[sys.argv[1]](Path(sys.argv[2]))
