"""Pinned values: what a run keeps for good, and what it means to continue the same run."""

import json
from collections.abc import Mapping

from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.loop.run_state import RunState
from antiphon.services.coordinator.journal.store import StoreTotals

MODEL_FILES = "the digest of model.path's files"
"""What a run keeps for good besides fields of its configuration."""


def pinned_values(config: RunConfig, model_digest: str = "") -> dict[str, str]:
    """Return the configuration that a run keeps for good, as JSON by field, and the digest of its model."""
    tree = config.model_dump(mode="json")
    found = {"run.seed": tree["run"]["seed"], "model.path": tree["model"]["path"]}
    for section in ("environment", "loop", "sampling"):
        found |= {f"{section}.{name}": value for name, value in tree[section].items()}
    for name in ("objective", "baseline", "normalise_advantages", "truncated_completions"):
        found[f"algorithm.{name}"] = tree["algorithm"][name]
    found["evaluation.prompts"] = tree["evaluation"]["prompts"]
    pinned = {name: json.dumps(value, sort_keys=True) for name, value in found.items()}
    return pinned | ({MODEL_FILES: model_digest} if model_digest else {})


def check_same_run(run_id: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Compare the values that a run was opened with to those that it is to continue with.

    Raises:
        ConfigError: when one differs.
    """
    for name, value in before.items():
        if now.get(name) != value:
            raise ConfigError(
                f"{name}={now.get(name)} differs from {value}, with which run {run_id} was opened; "
                "put it back, or start a new run"
            )


def check_totals(state: RunState, totals: StoreTotals) -> None:
    """Compare what was folded with what the store counts by itself.

    Raises:
        IntegrityError: when they differ.
    """
    committed = state.sealed[: len(state.commits)]
    folded = (len(state.commits), sum(batch.groups for batch in committed))
    if folded != (totals.steps, totals.trained_groups):
        raise IntegrityError(
            f"the journal contradicts itself: its events say {folded[0]} steps on {folded[1]} groups, "
            f"its tables {totals.steps} on {totals.trained_groups}; restore it from a copy"
        )
