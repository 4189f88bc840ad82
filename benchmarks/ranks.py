"""Ranks: learners of several ranks against one of one rank, and what is left of them when they are killed.

Each cell trains 5 steps of made-up batches with the learner's own code on gloo, by ZeRO stage, ranks and
objective, with nothing clipped. Compared with one rank: the gradient of step 1 (as Adam took it in) and its
norm, relative; the weights after 5 steps. So is a cell with adapters (learner.lora). For one objective the
cells are repeated whole and from their checkpoints. In bfloat16 the cosine of the gradient counts. Then the
steps of two models are timed, 2 ranks of one thread against one rank of two, with the share of them that
orders and figures take.

Memory: all tensors of rank 0 when it holds most (gradients are reduced, or updated with), over the formula of
core/ranks/memory.py; and the memory that loading a model of 200 MB takes at stage 3, in parts over whole.

Kills: a run of 2 ranks under the supervisor; in each start one rank dies at a fail-point, or the supervisor
is killed from outside. The run must end with the digests of one that nothing disturbs, no version may have
two, and 5 s after a kill nothing may be left of the processes before.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer

from antiphon.benchmarks.parts import thin_model as thin
from antiphon.benchmarks.parts.ranks.program import MODEL
from antiphon.benchmarks.parts.results import above, benchmark_parser, execute, finish
from antiphon.benchmarks.parts.warmstart.tiny_model import (
    MixtureShape,
    ModelShape,
    build_model,
    save_tiny_model,
)
from antiphon.system.rank_places import rank_environment

OBJECTIVES = ("dapo", "grpo", "dr_grpo", "gspo", "cispo")
PROGRAM = "antiphon.benchmarks.parts.ranks.program"
SUPERVISED = "antiphon.benchmarks.parts.ranks.supervised"
CELLS_S = 1800.0
RUN_S = 240.0
"""Longest wait for the cells of one number of ranks, and for the next start of a killed run."""
GONE_S = 5.0
BOTH = ("forward", "backward", "optimizer", "gather", "save")
PLACES = {0: (*BOTH, "checkpoint.inside", "commit.before"), 1: (*BOTH, "idle")}
"""Fail-points of the learner at which each rank is killed."""
SUPERVISOR = "supervisor"
LIMITS = {
    "gradient_l2_worst": 1e-6,
    "norm_error_worst": 1e-6,
    "weights_l2_worst": 2e-5,
    "memory_over_formula_worst": 1.05,
    "load_peak_share": 0.7,
}
MOST_CONTROL = 0.01
LEAST_SPEED = {"speed_zero1": 0.9, "speed_zero2": 1.0, "speed_zero3": 0.8}
"""Of one rank with two threads, that 2 of one must reach on an idle machine."""
LEAST_MEMORY = 0.9
"""Of the formula that a cell holds: one that plans far too much refuses what would run."""
MIXTURE = MixtureShape(layers=2, mlp_size=64)
"""Of the mixture that is trained: 2 of 4 experts."""
LOADED = ModelShape(512, 12, 8, 4, 64, 2048, 1024)
"""Of the model that is loaded whole and in parts: 200 MB in float32."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, check and print; return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), choices=OBJECTIVES)
    parser.add_argument("--bfloat16", type=int, default=1, help="0 leaves bfloat16 out")
    parser.add_argument("--adapters", type=int, default=16, help="rank of adapters; 0 leaves them out")
    parser.add_argument("--moe", action="store_true", help="cells of a mixture of experts")
    parser.add_argument("--speed", type=int, default=1, help="rounds of the timed steps; 0 leaves them out")
    parser.add_argument("--load", type=int, default=1, help="0 leaves the memory of loading out")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--kill-stage", type=int, default=3)
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {}
    if options.ranks:
        kinds = options.objectives, bool(options.bfloat16), options.adapters
        with tempfile.TemporaryDirectory(prefix="antiphon-ranks-") as name:
            model = str(saved_model(MIXTURE, Path(name)) if options.moe else MODEL)
            result |= compare(options.ranks, options.stages, *kinds, model)
    if options.load:
        result["load_peak_share"] = load_share()
    if options.speed:
        result |= speeds(options.speed)
    if options.kills:
        result |= kill(options.kills, options.kill_stage)
    violated = [
        f"{name} is {result[name]:.3g}, more than {most:.3g}"
        for name, most in LIMITS.items()
        if not result.get(name, 0.0) <= most
    ]
    violated += [
        f"{name} is false" for name in ("digests_equal", "killed_digests_equal") if not result.get(name, True)
    ]
    if (least := result.get("memory_over_formula_least", 1.0)) < LEAST_MEMORY:
        violated.append(f"memory_over_formula_least is {least:.3g}, less than {LEAST_MEMORY:g}")
    violated += ["processes were left after a kill"] if result.get("orphans") else []
    violated += (
        ["the cosine in bfloat16 is below 0.9999"] if result.get("bfloat16_cosine", 1.0) < 0.9999 else []
    )
    at_size = [
        f"{name} is {result[name]:.3g}, less than {least:g}"
        for name, least in LEAST_SPEED.items()
        if result.get(name, least) < least
    ]
    at_size += above({"control_share": 0.0, **result}, {"control_share": MOST_CONTROL})
    return finish(result, record=options.record, violated=violated, at_size=at_size)


def cell(ranks: int, stage: int, objective: str, **others: Any) -> dict[str, Any]:
    """Return a cell as the program takes it."""
    usual = {"dtype": "float32", "threads": 1, "clip": 1e9, "groups": 6, "again": False, "lora": 0}
    usual["tokens"] = 128  # few activations, which are not to be counted
    return {"ranks": ranks, "stage": stage, "objective": objective, **usual, **others}


def run_cells(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run cells of one number of ranks in the same processes, one after the other."""
    with tempfile.TemporaryDirectory(prefix="antiphon-ranks-") as name:
        folder = Path(name)
        (folder / "cells.json").write_text(json.dumps(cells))
        run_ranks("cells", folder, cells[0]["ranks"])
        return [torch.load(folder / f"found-{number}.pt") for number in range(len(cells))]


def run_ranks(what: str, folder: Path, world: int) -> None:
    """Run the program's `what` on ranks that meet in a folder, to its end."""
    command = [sys.executable, "-P", "-W", "ignore", "-m", PROGRAM, what, str(folder)]
    processes = [
        subprocess.Popen(command, env={**os.environ, **rank_environment(rank, world, folder / "meeting")})
        for rank in range(world)
    ]
    try:
        for process in processes:
            if process.wait(CELLS_S):
                raise RuntimeError(f"a rank ended with status {process.returncode}")
    finally:
        for process in processes:
            process.kill()


def load_share() -> float:
    """Return what loading in parts takes of memory over what it takes whole, of the rank that takes most."""
    peaks = []
    with tempfile.TemporaryDirectory(prefix="antiphon-ranks-") as name:
        folder = Path(name)
        saved_model(LOADED, folder / "model")
        for whole in (True, False):
            (folder / "load.json").write_text(json.dumps({"ranks": 2, "whole": whole}))
            run_ranks("load", folder, 2)
            (folder / "meeting").unlink(missing_ok=True)
            peaks.append(max(int((folder / f"peak-{rank}").read_text()) for rank in range(2)))
    return round(peaks[1] / peaks[0], 3)


def compare(
    worlds: Sequence[int],
    stages: Sequence[int],
    objectives: Sequence[str],
    bfloat16: bool,
    lora: int,
    model: str,
) -> dict[str, Any]:
    """Compare every cell, all of one model, with one rank."""
    kinds = [("float32", objective, 0) for objective in objectives]
    kinds += [("float32", objectives[0], lora)] if lora else []
    kinds += [("bfloat16", objectives[0], 0)] if bfloat16 else []
    found = run_cells(
        [cell(1, 0, objective, dtype=dtype, lora=lora, model=model) for dtype, objective, lora in kinds]
    )
    bases = {kind: base for kind, base in zip(kinds, found, strict=True)}
    worst = dict.fromkeys([*LIMITS][:4], 0.0)
    same, cosine, count, least = True, 1.0, 0, math.inf
    for world in worlds:
        cells = [
            cell(world, stage, objective, dtype=dtype, lora=lora, model=model)
            | {"again": kind == kinds[0][:2]}
            for stage in stages
            for dtype, objective, lora in kinds
            for kind in [(dtype, objective)]
        ]
        for found_one in run_cells(cells):
            count += 1
            base = bases[tuple(found_one["cell"][name] for name in ("dtype", "objective", "lora"))]
            same &= found_one["same"]
            memory = found_one["memory_over_formula"]
            worst["memory_over_formula_worst"] = max(worst["memory_over_formula_worst"], memory)
            least = min(least, memory)
            ours, theirs = base["gradient"], found_one["gradient"]
            if found_one["cell"]["dtype"] == "bfloat16":
                cosine = min(cosine, float(ours @ theirs / (ours.norm() * theirs.norm())))
                continue
            apart = {
                "gradient_l2_worst": float((ours - theirs).norm() / ours.norm()),
                "norm_error_worst": abs(found_one["norm"] / base["norm"] - 1.0),
                "weights_l2_worst": float(
                    (base["weights"] - found_one["weights"]).norm() / base["weights"].norm()
                ),
            }
            print(found_one["cell"], apart, memory, file=sys.stderr, flush=True)
            worst |= {name: max(worst[name], value) for name, value in apart.items()}
    return {
        "cells": count,
        **worst,
        "memory_over_formula_least": least,
        "digests_equal": same,
        **({"bfloat16_cosine": cosine} if bfloat16 else {}),
    }


def speeds(rounds: int) -> dict[str, Any]:
    """Return how many times as fast 2 ranks of a thread are as one rank of two.

    The demo's model trains at stage 1, the thin one, whose vocabulary is Qwen's, at 2 and 3. `control_share`
    is the largest share of rank 0's steps that orders and figures take.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="antiphon-ranks-") as name:
        for stages, groups, model in (
            ((1,), 32, {}),
            ((2, 3), 8, {"model": str(saved_model(thin.SHAPE, Path(name)))}),
        ):
            given = {"groups": groups, "tokens": 2048, **model}  # as learner.micro_batch_tokens has it
            sums: dict[int, float] = dict.fromkeys(stages, 0.0)
            alone, control = 0.0, 0.0
            for _ in range(rounds):
                (base,) = run_cells([cell(1, 0, OBJECTIVES[0], threads=2, **given)])
                alone += min(base["seconds"][1:])
                for one in run_cells([cell(2, stage, OBJECTIVES[0], **given) for stage in stages]):
                    sums[one["cell"]["stage"]] += min(one["seconds"][1:])
                    control = max(control, one["control_share"])
            found |= {f"speed_zero{stage}": round(alone / spent, 3) for stage, spent in sums.items()}
            found["control_share"] = round(max(control, found.get("control_share", 0.0)), 5)
    return found


def saved_model(shape: ModelShape, folder: Path) -> Path:
    """Make a model with the demo's tokenizer, which is not needed."""
    save_tiny_model(build_model(shape, 0), AutoTokenizer.from_pretrained(MODEL), folder)
    return folder


def plan_kills(count: int) -> list[str]:
    """Return kills that go through all places, ranks and visits."""
    places = [(rank, place) for rank in PLACES for place in PLACES[rank]]
    kills = []
    for number in range(count):
        if number % 10 == 9:
            kills.append(SUPERVISOR)
            continue
        rank, place = places[number % len(places)]
        visits = 1 + number % 3
        if place == "gather":
            visits = 30 * visits  # of a tensor each
        kills.append(f"{rank} learner.{place} {visits}")
    return kills


def kill(count: int, stage: int) -> dict[str, Any]:
    """Kill a run again and again, and compare what it comes to with an undisturbed one."""
    steps = 4 + 4 * count  # more than the starts get on before they are killed
    kills = plan_kills(count)
    with tempfile.TemporaryDirectory(prefix="antiphon-ranks-") as name:
        calm, killed = Path(name) / "calm", Path(name) / "killed"
        for folder in (calm, killed):
            folder.mkdir()
            told = {"cell": cell(2, stage, OBJECTIVES[0]), "steps": steps}
            (folder / "run.json").write_text(json.dumps(told))
        expected = digests(supervise(calm, [])[0])
        log, orphans, happened = supervise(killed, kills)
        found = digests(log)
        twice = {version for version, seen in found.items() if len(seen) > 1}
        return {
            "kills": happened,
            "orphans": orphans,
            "versions_with_two_digests": len(twice),
            "killed_digests_equal": found == expected and not twice,
        }


def digests(log: str) -> dict[int, set[str]]:
    """Return the digests that each version was noted with."""
    found: dict[int, set[str]] = {}
    for line in log.splitlines():
        version, digest = line.split()
        found.setdefault(int(version), set()).add(digest)
    return found


def supervise(folder: Path, kills: Sequence[str]) -> tuple[str, int, int]:
    """Run to the end with kills; return the noted digests, processes left after kills, and kills done."""
    starts, orphans, happened, first = folder / "starts", 0, 0, 0
    seen: list[list[int]] = []
    while not (folder / "done").exists():
        command = [sys.executable, "-P", "-m", SUPERVISED, str(folder), str(first), json.dumps(list(kills))]
        with (folder / "log").open("ab") as log:
            supervisor = subprocess.Popen(command, stdout=log, stderr=log)
        moved, size = time.monotonic(), -1
        while supervisor.poll() is None:
            time.sleep(0.05)
            lines = starts.read_text().splitlines() if starts.exists() else []
            progress = len(lines) + (
                (folder / "digests").stat().st_size if (folder / "digests").exists() else 0
            )
            if progress != size:
                moved, size = time.monotonic(), progress
            if time.monotonic() - moved > RUN_S:
                supervisor.kill()
                raise RuntimeError(f"nothing moved for {RUN_S:g} s:\n{(folder / 'log').read_text()[-3000:]}")
            for line in lines[len(seen) :]:
                kill, pids = json.loads(line)
                happened += bool(seen)
                orphans += left_of(seen[-1]) if seen else 0
                seen.append(pids)
                first = len(seen)
                if kill == SUPERVISOR:
                    wait_for_a_version(folder, supervisor)
                    supervisor.kill()
        supervisor.wait()
    return (folder / "digests").read_text(), orphans + left_of(seen[-1]), happened


def wait_for_a_version(folder: Path, supervisor: "subprocess.Popen[bytes]") -> None:
    """Wait until the ranks have noted another version, so that they are at work."""
    log = folder / "digests"
    before, deadline = log.stat().st_size if log.exists() else 0, time.monotonic() + RUN_S
    while (not log.exists() or log.stat().st_size == before) and supervisor.poll() is None:
        if time.monotonic() > deadline:
            raise RuntimeError("the ranks noted no version")
        time.sleep(0.02)


def left_of(pids: Sequence[int]) -> int:
    """Return how many of some processes are there GONE_S after."""
    deadline = time.monotonic() + GONE_S
    while (left := sum(map(runs, pids))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def runs(pid: int) -> bool:
    """Return whether a process still runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    execute(main)
