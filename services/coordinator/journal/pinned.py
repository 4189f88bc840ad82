"""Pinned values: what a run keeps for good, and what it means to continue the same run."""

import json
from collections.abc import Mapping

from antiphon.core.config import ORDER_OF_RETIRED, RETIRED_ORDERS, RunConfig
from antiphon.core.digests import digest_bytes, digest_file
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.loop.run_state import ENVIRONMENT_FILES, REWARD_RANGE, RunState
from antiphon.core.messages import UNIT_RANGE, RewardRange
from antiphon.core.reference_config import WHO_SCORES, ReferenceSection
from antiphon.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, start_folder
from antiphon.models.codec import model_folder
from antiphon.models.directory import model_digest
from antiphon.services.coordinator.journal.store import StoreTotals
from antiphon.system.packages import environment_facts, method_facts

MODEL_FILES = "the digest of model.path's files"
"""As `ENVIRONMENT_FILES`, what a run keeps for good besides its configuration, where the files are here."""
START, A_FOLDER = "learner.lora.start", '"a folder"'
START_FILES = f"the digest of {START}'s files"
REFERENCE_FILES = "the digest of reference.model's files"
TEACHER = "reference.model"
METHOD_FILES = {name: f"the digest of algorithm.{name}'s files" for name in ("objective", "advantage")}
"""The same of the user's own functions, by their fields."""
UNPINNED = {
    REWARD_RANGE: "[0.0, 1.0]",
    "evaluation.samples": "1",
    "sampling.stop": "[]",
    "algorithm.advantage": "null",
    START: "null",
    "algorithm.deviation": '"group"',
    "algorithm.overlong_margin_tokens": "null",
    "algorithm.overlong_penalty": "0.5",
    "judge.model": '""',
    "judge.kind": '"chat"',
    "judge.prompt": "null",
    "judge.scale": "[0.0, 10.0]",
    TEACHER: '""',
    **{
        f"reference.{name}": json.dumps(value)
        for name, value in ReferenceSection().model_dump(mode="json", exclude=set(WHO_SCORES)).items()
    },
}
"""What runs keep only where it has another value than this."""


def input_files(config: RunConfig) -> dict[str, str]:
    """Return the digests of the files that a run is made from, of those that are on this machine.

    An environment from outside, and an objective or advantage of the user's own, counts with all files of its
    package, an environment from files with these.
    """
    model, package = model_folder(config.model.path), environment_facts(config.environment)
    found = {} if model is None else {MODEL_FILES: model_digest(model)}
    start = config.learner.lora.start
    if start is not None:
        files = [start_folder(start) / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
        if all(path.is_file() for path in files):
            found[START_FILES] = digest_bytes("".join(map(digest_file, files)).encode())
    here = config.reference.model and not config.reference.url
    teacher = model_folder(config.reference.model) if here else None
    if teacher is not None:
        found[REFERENCE_FILES] = model_digest(teacher)
    for field, facts in method_facts(config.algorithm).items():
        found[METHOD_FILES[field]] = facts["digest"]
    return found | ({ENVIRONMENT_FILES: package["digest"]} if package else {})


def pinned_values(
    config: RunConfig, files: Mapping[str, str] | None = None, reward_range: RewardRange = UNIT_RANGE
) -> dict[str, str]:
    """Return the configuration that a run keeps for good, as JSON by field, what `input_files` found, and the
    environment's range of rewards.
    """
    tree = config.model_dump(mode="json")
    found = {"run.seed": tree["run"]["seed"]}
    found |= {f"model.{name}": tree["model"][name] for name in ("path", "renderer", "template_arguments")}
    for section in ("environment", "loop", "sampling"):
        found |= {f"{section}.{name}": value for name, value in tree[section].items()}
    if config.learner.lora.start is not None:
        found[START] = "a folder"  # wherever it lies; its files are compared
    del found["environment.host_command"]  # how a host is started says nothing of what it runs
    of_rewards = "baseline", "normalise_advantages", "deviation", "overlong_margin_tokens", "overlong_penalty"
    for name in ("objective", "advantage", *of_rewards, "truncated_completions"):
        found[f"algorithm.{name}"] = tree["algorithm"][name]
    found |= {f"judge.{name}": tree["judge"][name] for name in ("model", "kind", "prompt", "scale")}
    found |= {
        f"reference.{name}": value for name, value in tree["reference"].items() if name not in WHO_SCORES
    }
    if config.reference.url:  # of a folder the files are compared
        found[TEACHER] = config.reference.model
    found |= {f"evaluation.{name}": tree["evaluation"][name] for name in ("prompts", "samples")}
    found[REWARD_RANGE] = reward_range
    texts = {name: json.dumps(value, sort_keys=True) for name, value in found.items()}
    return {name: text for name, text in texts.items() if UNPINNED.get(name) != text} | dict(files or {})


def check_same_run(run_id: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Compare the values that a run was opened with to those that it is to continue with.

    Raises:
        ConfigError: when one differs.
    """
    where_known = (
        MODEL_FILES,
        START_FILES,
        REFERENCE_FILES,
        ENVIRONMENT_FILES,
        REWARD_RANGE,
        *METHOD_FILES.values(),
    )
    for name, value in (UNPINNED | dict(before)).items():
        if name in where_known and name not in now:
            continue  # not on this machine, or not asked for
        if name == "loop.order" and json.loads(value) in RETIRED_ORDERS:
            value = json.dumps(ORDER_OF_RETIRED)
        if name == START and START_FILES in before:
            value = A_FOLDER  # earlier releases noted its place
        if (found := now.get(name, UNPINNED.get(name))) != value:
            raise ConfigError(
                f"{name}={found} differs from {value}, with which run {run_id} was opened; "
                "put it back, or start a new run (--fresh)"
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
