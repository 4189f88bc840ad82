"""Document facts: what the documents of batches, versions and evaluations say, without clocks."""

from collections.abc import Mapping
from typing import Any

BATCH_FACTS = (
    "trajectories",
    "groups",
    "tokens",
    "reward_mean",
    "staleness_histogram",
    "replaced",
    "samples_digest",
)
"""What a batch's document repeats of its profile."""
VERSION_FACTS = ("step", "version", "weights_digest", "batch_digest", "metrics")
"""What a version's document takes from the run log's line."""


def batch_facts(
    run_id: str, step: int, digest: str, timings_digest: str, profile: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is said of a batch."""
    known = {name: profile[name] for name in BATCH_FACTS if name in profile}
    own = {"run_id": run_id, "step": step, "batch_digest": digest, "timings_digest": timings_digest}
    return {**known, **own}


def version_facts(run_id: str, version: int, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of a version, from its line of the run log and `retention.recompute_note`.

    >>> sorted(version_facts("demo-1", 0, {"version": 0, "weights_digest": "ab", "timings": {}}))
    ['parent', 'run_id', 'version', 'weights_digest']
    """
    known = {name: line[name] for name in (*VERSION_FACTS, "recompute") if name in line}
    return {**known, "run_id": run_id, "version": version, "parent": max(0, version - 1)}


def evaluation_facts(run_id: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of an evaluation, from its line of the run log."""
    return {**{name: value for name, value in line.items() if name != "timings"}, "run_id": run_id}
