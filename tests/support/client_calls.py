"""Calls as a client makes them, on a vocabulary of 32 tokens."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.core.client_records import CLIENT, Datum, TrainingCall
from antiphon.core.config import RunConfig, build_config

VOCABULARY = 32


def client_config(model: Path, **changes: Any) -> RunConfig:
    """Return the configuration of a client-driven run; changes as `section__field`."""
    tree: dict[str, Any] = {
        "model": {"path": str(model)},
        "environment": {"name": CLIENT},
        "learner": {"micro_batch_tokens": 64, "checkpoint_interval": 2},
        "loop": {"mode": "elastic"},
        "rollout": {"max_model_tokens": 100},
        "sampling": {"max_tokens": 50},
        "services": {"stall_timeout_s": 0.3},
    }
    for key, value in changes.items():
        section, field = key.split("__")
        tree.setdefault(section, {})[field] = value
    return build_config(tree)


def make_data(seed: int, count: int, loss: str = "cross_entropy") -> tuple[Datum, ...]:
    """Return sequences of 2 to 20 tokens; the first half of each is a prompt, whose targets are zeros."""
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        length = int(rng.integers(2, 21))
        ids = rng.integers(0, VOCABULARY, length + 1)
        sampled = np.arange(length) >= length // 2
        weight = (rng.normal(size=length) * sampled).astype(np.float32)
        inputs = {"weights": weight}
        if loss != "cross_entropy":
            logprobs = np.where(sampled, -rng.exponential(3.0, length), 0).astype(np.float32)
            inputs = {"advantages": weight, "logprobs": logprobs}
        if loss == "stable_reinforce":
            inputs["staleness"] = np.ones(length, dtype=np.float32)
        data.append(Datum(ids[:-1].astype(np.int32), np.where(sampled, ids[1:], 0), inputs))
    return tuple(data)


def make_call(seed: int = 0, count: int = 8, loss: str = "cross_entropy", **given: Any) -> TrainingCall:
    return TrainingCall(loss, given.pop("config", {}), make_data(seed, count, loss), **given)


def chunks(call: TrainingCall, count: int) -> list[TrainingCall]:
    """Return the data of a call as this many calls."""
    bounds = np.linspace(0, len(call.data), count + 1).astype(int)
    return [TrainingCall(call.loss, call.config, call.data[start:stop]) for start, stop in pairwise(bounds)]
