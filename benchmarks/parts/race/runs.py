"""Race parts: one run of this project, and what its steps took."""

import math
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy.stats import t as student

from antiphon.benchmarks.parts.measure import JobRun, journal_events, run_job, scratch_home, step_ends
from antiphon.core.config import RunConfig, load_config
from antiphon.core.dissemination.reports import DeliveryRecord
from antiphon.lineage.rollout_table import decode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.models.codec import resolve_model_path
from antiphon.runs.directory import store_directory


def link_rate(payload_bytes: float, workers: int, share: float, busy_s: float) -> float | None:
    """Return the origin's rate at which one version reaches all workers in a share of a step's work.

    Args:
        payload_bytes: of one version.
        workers: that fetch it, each over the same uplink.
        share: seconds of the transfer over `busy_s`; 0 is a link without a cap.
        busy_s: seconds of rollout and training of one step.

    Returns:
        Bytes per second, or None for no cap.

    >>> link_rate(2e6, 2, 0.5, 4.0), link_rate(2e6, 2, 0.0, 4.0)
    (2000000.0, None)
    """
    if share < 0 or busy_s <= 0:
        raise ValueError(
            f"a link cannot take {share:g} of {busy_s:g} s; give a share from 0 and a longer run"
        )
    return payload_bytes * workers / (share * busy_s) if share else None


def lower_end(values: Sequence[float]) -> float | None:
    """Return the lower end of the 95% interval of a mean (Student's t); a single value has no interval.

    >>> lower_end([0.5])
    """
    if len(values) < 2:
        return None
    quantile = float(student.ppf(0.975, len(values) - 1))
    return fmean(values) - quantile * stdev(values) / math.sqrt(len(values))


def reached_at(level: float, versions: Sequence[int], scores: Sequence[float]) -> float | None:
    """Return the version at which scores first reach a level, between evaluations on a straight line.

    >>> reached_at(0.7, [0, 10, 20], [0.2, 0.6, 0.8]), reached_at(0.9, [0, 10], [0.2, 0.6])
    (15.0, None)
    """
    for place, score in enumerate(scores):
        if score >= level:
            if place == 0:
                return float(versions[0])
            before, begin = scores[place - 1], versions[place - 1]
            return begin + (versions[place] - begin) * (level - before) / (score - before)
    return None


def seconds_at(version: float, seconds: Sequence[float]) -> float:
    """Return when a version was there, counted from the loop's begin.

    Args:
        version: may lie between two.
        seconds: at which step 0, 1, ... ended; the step `v - 1` makes version v.

    >>> seconds_at(1.5, [2.0, 5.0]), seconds_at(0.0, [2.0])
    (3.5, 0.0)
    """
    return float(np.interp(version, range(len(seconds) + 1), [0.0, *seconds]))


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds in which at least one span lasts.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, last = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def run_here(
    config: Path, words: Sequence[str], label: str, samples: int, timeout_s: float, base: bool = False
) -> dict[str, Any]:
    """Run the main job to its end in a home of its own and return what it showed, in plain values.

    Args:
        config: the recipe.
        words: `section.field=value` for it.
        label: of its log.
        samples: completions of each held-out prompt for `reward`, that of the last version; 0 for none.
        timeout_s: longest time of the run.
        base: whether `reward_before`, that of the base model, is wanted as well.

    Raises:
        SystemExit: when it failed.
    """
    with scratch_home() as home:
        job = run_job(home, config, words, label, timeout_s)
        resolved = load_config(config, list(words))
        found = shown(job, home, resolved)
        if samples:
            ledger = next((home / resolved.record.ledger).glob("*/versions"))
            last = resolved.run.steps
            found["reward"] = reward_of(resolved, ledger / f"v{last:06d}.safetensors", samples)
        if samples and base:
            weights = Path(resolve_model_path(resolved.model.path)) / "model.safetensors"
            found["reward_before"] = reward_of(resolved, weights, samples)
    return found


def reward_of(config: RunConfig, weights: Path, samples: int) -> float:
    """Return the held-out reward of weights, the samples shared out to the cores."""
    from antiphon.benchmarks.parts.learning.experiment import heldout_score  # heavy

    parts = min(samples, len(os.sched_getaffinity(0)))
    counts = [samples // parts + (part < samples % parts) for part in range(parts)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(parts, mp_context=context) as pool:
        scores = [
            pool.submit(heldout_score, config, weights, count, config.run.steps, part)
            for part, count in enumerate(counts)
        ]
        return sum(score.result() * count for score, count in zip(scores, counts, strict=True)) / samples


def shown(job: JobRun, home: Path, config: RunConfig) -> dict[str, Any]:
    """Return seconds, CPU seconds, bytes, tokens and staleness of a finished run."""
    timings, metrics = job.timings(), job.metrics()
    figures, stages = timings["figures"], timings["stages"]
    steps = figures["steps"]
    ends = step_ends(timings)
    epoch = min(len(ends), max(1, config.environment.train_size // config.loop.prompts_per_step))
    begun = min(span["started_s"] for span in stages)
    events = journal_events(home / "runs" / timings["run_id"] / "journal.db")
    deliveries = [DeliveryRecord(**body) for kind, body in events if kind == "snapshot.delivered"]
    fetched = [one for one in deliveries if one.version > 0]
    lengths = [n for kind, body in events if kind == "group.submitted" for n in body["token_counts"]]
    store = ArtifactStore(store_directory(home))
    answers = [
        row.token_ids.tolist()
        for kind, body in events
        if kind == "batch.sealed"
        for row in decode_batch(store.get(body["digest"]))
    ]
    payload = max((path.stat().st_size for path in home.glob("runs/*/payloads/*.payload")), default=0)
    cpu_s = job.cpu_at(max(ends)) - job.cpu_at(begun)
    kinds = job.kinds_after(begun)
    return {
        "seconds_per_step": figures["seconds_per_step"],
        "seconds_per_step_first_epoch": (figures["wall_s"] - (ends[-1] - ends[epoch - 1])) / epoch,
        # The stage `reward` begins with the sampling of a step and ends with its sealed batch.
        "rollout_s": mean_of_stage(stages, "reward"),
        "training_s": mean_of_stage(stages, "step"),
        "broadcast_s": mean_of_stage(stages, "broadcast"),
        "delivery_s": slowest_delivery(fetched),
        "bytes_per_version": sum(one.bytes for one in fetched)
        / max(1, len({one.version for one in fetched})),
        "payload_bytes": payload,
        "cpu_s_per_step": cpu_s / steps,
        "cores_used": cpu_s / (max(ends) - begun),
        **{f"cpu_s_per_step_{kind}": taken / steps for kind, taken in kinds.items()},
        "startup_s": figures["startup_s"],
        "job_s": job.seconds,
        "job_cpu_s": job.cpu_s,
        "samples": figures["groups_trained"] + figures["groups_filtered"],
        "tokens_sampled": figures["tokens_sampled"],
        "tokens_per_pass": figures["drafting_tokens_per_pass"],
        "learner_idle_share": figures["learner_idle_share"],
        "dropped_stale_share": figures["groups_dropped_stale_share"],
        "staleness_mean": figures["staleness_mean"],
        "staleness_max": max(map(int, metrics["staleness"])),
        "tokens_median": float(np.median(lengths)),
        "tokens_p99": float(np.quantile(lengths, 0.99)),
        "repeated_share": repeated_share(answers),
    }


def mean_of_stage(stages: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the mean seconds of a stage, the first one left out, which waits for engines."""
    spans = sorted((one for one in stages if one["stage"] == name), key=lambda one: int(one["number"]))
    return fmean(one["ended_s"] - one["started_s"] for one in spans[1:])


def slowest_delivery(deliveries: Sequence[DeliveryRecord]) -> float:
    """Return the mean over versions of the seconds until the last worker had it; 0 where files are linked."""
    slowest: dict[int, float] = {}
    for one in deliveries:
        if one.bytes:
            slowest[one.version] = max(slowest.get(one.version, 0.0), one.seconds)
    return fmean(slowest.values()) if slowest else 0.0


def repeated_share(answers: Sequence[Sequence[int]], size: int = 8, longest: float = 0.01) -> float:
    """Return the share of the n-grams of the longest answers that stood before in the same answer.

    Args:
        answers: token ids of each.
        size: n.
        longest: share of the answers that counts, at least one of them.

    >>> repeated_share([[1, 2, 3, 1, 2, 3], [9]], size=2)
    0.4
    """
    chosen = sorted(answers, key=len, reverse=True)[: math.ceil(longest * len(answers))]
    grams = [[tuple(one[at : at + size]) for at in range(len(one) - size + 1)] for one in map(list, chosen)]
    count = sum(map(len, grams))
    return (count - sum(len(set(one)) for one in grams)) / count if count else 0.0
