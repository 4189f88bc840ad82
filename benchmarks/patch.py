"""Patches: bytes and rates of lossless patches between consecutive versions of real training runs.

For each learning rate the demo's model is trained by production's trainer in one process (AdamW, GRPO-like
updates, master weights in float32), and every version is cast to bfloat16 as a snapshot. Reported are means
over the last half of the steps: `changed_share` of the elements, `predicted_share` from masters and updates
alone, `bytes_share` of the patch from the version before, `bytes_share_rung_K` from K versions before,
`estimated_bytes_share` from the predicted change, `bytes_share_full_zstd` of the compressed full payload;
and the same of float32 snapshots, which change everywhere. Then a bfloat16 model of `--megabytes` with the
changed share of each run is encoded and applied with all cores. Rates are megabytes of full size per
CPU second, which is per second and core; the slowest learning rate's count.

Fails when a patch takes more than 1%, 5% or 20% of the full bytes, when encoding or applying is slower than
300 MB/s and core, when the predictor is off by more than 5%, or when any bit differs. The last line is JSON.

    .venv/bin/python benchmarks/patch.py [--megabytes 64]
"""

import argparse
import io
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from antiphon.benchmarks.parts.learning.experiment import Experiment
from antiphon.benchmarks.parts.measure import PROJECT
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.core.broadcast.patches import Change, estimated_bytes
from antiphon.core.config import load_config
from antiphon.core.records import TensorEntry
from antiphon.weights.patch import apply_patch, encode_patch

CONFIG = PROJECT / "examples" / "quickstart.yaml"
BOUNDS = {"lr_1e6": ("1e-6", 0.01), "lr_1e5": ("1e-5", 0.05), "lr_1e4": ("1e-4", 0.20)}
"""Name -> learning rate, largest share of the full bytes."""
LEAST_MB_PER_S = 300.0
MOST_PREDICTOR_ERROR = 0.05
RUNGS = (1, 2, 4, 8)
TILE_MB = 64
"""Size of the random part of the synthetic model, which repeats it; blocks are far smaller."""
SAMPLE = 1 << 20
"""Elements that the predictor sees."""
OLD, NEW = "a" * 64, "b" * 64
Array = npt.NDArray[Any]
_PRECISION = {"bfloat16": (8, -133), "float16": (11, -24), "float32": (24, -149), "float64": (53, -1074)}
"""Significant bits, and the exponent of the smallest positive number."""


def predicted_change(weights: npt.NDArray[Any], updates: npt.NDArray[Any], dtype: str) -> Change:
    """Predict what an update changes in a snapshot; neither version is rounded for that.

    Args:
        weights: [N] master weights, or a sample of them.
        updates: [N], what is added to them; over several steps their sum.
        dtype: of the snapshot: bfloat16, float16, float32 or float64.

    >>> predicted_change(np.array([1.0, 1.0]), np.array([2.0**-9, 0.0]), "bfloat16").share
    0.125
    """
    significant, smallest = _PRECISION[dtype]
    _, exponents = np.frexp(weights)
    spacing = np.where(weights == 0, smallest, np.maximum(exponents - significant, smallest))
    ulps = np.abs(updates) / np.ldexp(1.0, spacing)
    changed = np.minimum(1.0, ulps)
    bits = np.log2(np.maximum(1.0, ulps))
    total = float(changed.sum())
    return Change(total / max(1, len(ulps)), float((changed * bits).sum()) / total if total else 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """Weights of a version as a snapshot holds them."""

    data: Array
    """Canonical bytes."""
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True, slots=True)
class Coded:
    """What one payload took."""

    bytes_share: float
    encode_s: float
    apply_s: float
    """CPU seconds of all threads."""
    equal: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, encode, apply, compare."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="of the synthetic model (default 1000)")
    parser.add_argument(
        "--only", nargs="+", choices=list(BOUNDS), default=list(BOUNDS), help="learning rates"
    )
    parser.add_argument("--rungs", type=int, nargs="+", default=list(RUNGS), help="K (default 1 2 4 8)")
    parser.add_argument("--steps", type=int, default=32, help="learner steps of each run (default 32)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each rate (default 3)")
    parser.add_argument("overrides", nargs="*", help="key=value pairs for all runs")
    options = parser.parse_args(arguments)
    if 1 not in options.rungs or options.steps < 2 * max(options.rungs):
        parser.error(f"--rungs must name 1, and --steps be at least {2 * max(options.rungs)}")
    result: dict[str, Any] = {}
    rates: dict[str, dict[str, list[float]]] = {}
    equal = True
    for name in options.only:
        result[name], run_equal = measure_run(BOUNDS[name][0], options)
        print(f"{name}: {result[name]}", flush=True)
        synthetic, rates[name], synthetic_equal = measure_synthetic(result[name]["changed_share"], options)
        result[name]["synthetic"] = synthetic
        print(f"{name}, synthetic: {synthetic}", flush=True)
        equal &= run_equal and synthetic_equal
    found = [part for name in options.only for part in (result[name], result[name]["synthetic"])]
    errors = [abs(part["predicted_share"] / part["changed_share"] - 1.0) for part in found]
    slowest = {
        key: min((rates[name][key] for name in rates), key=median) for key in next(iter(rates.values()))
    }
    result |= {"megabytes": options.megabytes, "steps": options.steps}
    result |= {"bit_equal": equal, "predictor_error": round(max(errors), 4)}
    violated = [] if equal else ["a version that was encoded did not come back bit by bit"]
    at_size = violations(result, slowest)
    return finish(result, record=options.record, samples=slowest, violated=violated, at_size=at_size)


def violations(result: Mapping[str, Any], rates: Mapping[str, Sequence[float]]) -> list[str]:
    """Return what does not hold of sizes, speeds and predictions."""
    found = [
        f"{name}: a patch takes {result[name]['bytes_share']:.2%} of the full bytes, more than {most:.0%}"
        for name, (_, most) in BOUNDS.items()
        if name in result and result[name]["bytes_share"] > most
    ]
    for name in ("encode_mb_per_s", "apply_mb_per_s"):
        if median(rates[name]) < LEAST_MB_PER_S:
            found.append(f"{name} is {median(rates[name]):.0f}, less than {LEAST_MB_PER_S:.0f}")
    if result["predictor_error"] > MOST_PREDICTOR_ERROR:
        found.append(f"the predictor is off by {result['predictor_error']:.1%}")
    return found


def measure_run(rate: str, options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Train and compare the versions of the last half; return means, and whether all bits came back."""
    rows: list[dict[str, float]] = []
    masters: list[dict[str, torch.Tensor]] = []
    equal, rungs, threads = True, options.rungs, os.cpu_count() or 1
    for version, weights in enumerate(versions(rate, options.steps, options.overrides), 1):
        masters = [*masters[-max(rungs) :], weights]
        if version <= options.steps // 2:
            continue
        row: dict[str, float] = {}
        for dtype, prefix in ((torch.bfloat16, ""), (torch.float32, "fp32_")):
            new = snapshot(weights, dtype)
            parents = {f"rung_{rung}": snapshot(masters[-1 - rung], dtype) for rung in rungs}
            took = {name: patch(before, new, threads) for name, before in parents.items()}
            took["full_zstd"] = patch(None, new, threads)
            equal &= all(one.equal for one in took.values())
            row |= {f"{prefix}bytes_share_{name}": one.bytes_share for name, one in took.items()}
            row[f"{prefix}bytes_share"] = row.pop(f"{prefix}bytes_share_rung_1")
            width = dtype.itemsize
            differs = new.data.reshape(-1, width) != parents["rung_1"].data.reshape(-1, width)
            row[f"{prefix}changed_share"] = float(differs.any(1).mean())
        before, after = (snapshot(one, torch.float32).data.view(np.float32) for one in masters[-2:])
        row |= predicted(before, after - before)
        rows.append(row)
    return {key: round(fmean(row[key] for row in rows), 5) for key in rows[0]}, equal


def predicted(masters: Array, updates: Array) -> dict[str, float]:
    """Return the predicted share of a sample, and the estimated share of the bytes."""
    change = predicted_change(masters[:SAMPLE], updates[:SAMPLE], "bfloat16")
    return {
        "predicted_share": change.share,
        "estimated_bytes_share": estimated_bytes(change, 1 << 30, 2) / (1 << 30),
    }


def versions(rate: str, steps: int, words: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the float32 weights of every version of the demo's recipe at a constant learning rate."""
    overrides = [f"learner.learning_rate={rate}", "learner.schedule=constant", f"run.steps={steps}", *words]
    with tempfile.TemporaryDirectory(prefix="antiphon-patch-") as folder:
        experiment = Experiment(load_config(CONFIG, overrides), 0, Path(folder))
        for step in range(steps):
            experiment.train(step)
            yield experiment.weights(step + 1)
        experiment.close()


def snapshot(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Version:
    """Return the canonical bytes of weights in a dtype."""
    parts, entries, offset = [], [], 0
    for name in sorted(weights):
        data = weights[name].to(dtype).contiguous().view(torch.uint8).numpy().reshape(-1)
        shape = tuple(weights[name].shape)
        entries.append(TensorEntry(name, str(dtype).removeprefix("torch."), shape, offset, len(data)))
        parts.append(data)
        offset += len(data)
    return Version(np.concatenate(parts), tuple(entries))


def patch(parent: Version | None, new: Version, threads: int) -> Coded:
    """Encode the patch from another version, or a full payload without one; apply it and compare."""
    digests: dict[str, Any] = {"result_digest": NEW} | ({"parent_digest": OLD} if parent else {})
    before = parent.data.data if parent else None
    file, out = bytearray(), io.BytesIO(bytes(len(new.data)))  # memory that is there already
    started = time.process_time()
    encode_patch(before, new.data.data, new.tensors, file.extend, **digests, threads=threads)
    encoded = time.process_time()
    apply_patch(before, memoryview(file), new.tensors, out.write, **digests, threads=threads)
    applied = time.process_time()
    equal = bool(np.array_equal(np.frombuffer(out.getbuffer(), np.uint8), new.data))
    return Coded(len(file) / len(new.data), encoded - started, applied - encoded, equal)


def measure_synthetic(
    changed_share: float, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, list[float]], bool]:
    """Encode and apply a patch and a full payload of a large model whose changed share is that of a run.

    Returns:
        shares, samples of each rate, and whether all bits came back.
    """
    rng, threads = np.random.default_rng(0), os.cpu_count() or 1
    count = min(TILE_MB, options.megabytes) * 500_000
    masters = rng.normal(0.0, 0.03, count).astype(np.float32)
    direction = rng.normal(0.0, 1.0, count).astype(np.float32)
    low, high = 1e-9, 1.0
    for _ in range(40):  # the share grows with the scale of the update
        scale = math.sqrt(low * high)
        share = predicted_change(masters[:SAMPLE], scale * direction[:SAMPLE], "bfloat16").share
        low, high = (scale, high) if share < changed_share else (low, scale)
    updates = scale * direction
    parent, new = (model(values, options.megabytes) for values in (masters, masters + updates))
    changed = float((parent.data.view(np.uint16) != new.data.view(np.uint16)).mean())
    patch(parent, new, threads), patch(None, new, threads)  # compiles the kernels, warms the memory
    patches = [patch(parent, new, threads) for _ in range(options.repetitions)]
    fulls = [patch(None, new, threads) for _ in range(options.repetitions)]
    megabytes = len(new.data) / 1e6
    samples = {
        "encode_mb_per_s": [megabytes / one.encode_s for one in patches],
        "apply_mb_per_s": [megabytes / one.apply_s for one in patches],
        "full_encode_mb_per_s": [megabytes / one.encode_s for one in fulls],
        "full_decode_mb_per_s": [megabytes / one.apply_s for one in fulls],
    }
    figures = {
        "changed_share": changed,
        **predicted(masters, updates),
        "bytes_share": patches[0].bytes_share,
        "bytes_share_full_zstd": fulls[0].bytes_share,
    }
    return (
        {key: round(value, 5) for key, value in figures.items()}
        | {key: round(median(values), 1) for key, values in samples.items()},
        {key: [round(value, 1) for value in values] for key, values in samples.items()},
        all(one.equal for one in (*patches, *fulls)),
    )


def model(tile: Array, megabytes: int) -> Version:
    """Return a bfloat16 model whose layers repeat the values of a tile [elements]."""
    data = torch.from_numpy(tile).to(torch.bfloat16).view(torch.uint8).numpy()
    data = np.resize(data, megabytes * 1_000_000)
    layer, entries = 3072 * 1024 * 2, []
    for place, offset in enumerate(range(0, len(data), layer)):
        length = min(layer, len(data) - offset)
        entries.append(TensorEntry(f"layer.{place:05d}", "bfloat16", (length // 2,), offset, length))
    return Version(data, tuple(entries))


if __name__ == "__main__":
    execute(main)
