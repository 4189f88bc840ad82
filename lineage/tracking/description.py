"""Description: what tells an MLflow run from its neighbours: its name, its tags and the text on its page."""

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import ConfigError
from antiphon.lineage.documents.manifest import code_revision, flatten_config, source_tree
from antiphon.lineage.tracking.charts import experiment_link, run_link
from antiphon.lineage.tracking.pages import flow_run_link
from antiphon.system.set_up import program_name

NAMED = 3
"""Fields that a run's name lists."""
_SHOWN = (
    *("loop", "algorithm", "learner", "sampling", "model", "environment", "reward", "drafting", "rollout"),
    *("broadcast", "run", "evaluation"),
)
"""Sections whose fields a name lists, those that most often tell two runs apart first."""
_IDENTITY = {"run.name", "run.seed"}
"""Fields that the run's id says already."""
_WORDS = 4000
"""Characters of a tag that MLflow surely keeps."""


def nearest_example(config: RunConfig) -> tuple[str, dict[str, str]]:
    """Return the shipped example nearest to a configuration, and the fields in which they differ.

    Returns:
        the example's path in the checkout, "" for the defaults of every field, and field -> value.
    """
    own = flatten_config(config)
    found = {
        name: {
            field: value for field, value in own.items() if base[field] != value and field not in _IDENTITY
        }
        for name, base in _bases()
    }
    nearest = min(found, key=lambda name: len(found[name]))
    return nearest, found[nearest]


def display_name(run_id: str, fields: Mapping[str, str]) -> str:
    """Return the name of a run that differs in `fields` (field -> value) from what is usual.

    The differences come first, as lists of runs cut names short.

    >>> display_name("quickstart-s0-5bc4497b-1", {"record.dvc": "false", "loop.max_staleness": "0"})
    'max_staleness=0 · quickstart-s0-5bc4497b-1'
    """
    order = [f for section in _SHOWN for f in fields if f.startswith(f"{section}.")]
    said = [f"{field.rpartition('.')[2]}={fields[field]}" for field in order[:NAMED]]
    if len(order) > NAMED:
        said.append(f"{len(order) - NAMED} more")
    return f"{', '.join(said)} · {run_id}" if said else run_id


def origin_tags(config: RunConfig) -> dict[str, str]:
    """Return the tags that say where a run's configuration and code came from."""
    base, fields = nearest_example(config)
    said = ", ".join(f"{field}={value}" for field, value in fields.items())
    tags = {
        "antiphon.base": base or "defaults",
        "antiphon.differs": (said or "nothing")[:_WORDS],
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": base or "antiphon run",
    }
    revision = code_revision(source_tree())
    if revision:
        tags["mlflow.source.git.commit"] = str(revision["revision"])
        tags["mlflow.source.git.dirty"] = str(revision["modified"]).lower()
    return tags


def note(config: RunConfig, run_dir: Path, home: Path, experiment_id: str, mlflow_id: str) -> str:
    """Return the text of a run's page, Markdown: what differs, where more of it is, what to type."""
    base, fields = nearest_example(config)
    said = ", ".join(f"`{field}={value}`" for field, value in fields.items()) or "nothing"
    links = [
        f"[report]({run_link('', experiment_id, mlflow_id, 'artifacts/report.html')})",
        f"[beside the other runs]({experiment_link('', experiment_id)})",
    ]
    if flow_run := flow_run_link(run_dir, home):
        links.append(f"[its stages in Prefect]({flow_run})")
    run_id, antiphon = run_dir.name, program_name()
    return (
        f"{' · '.join(links)}\n\n"
        f"Differs from {f'`{base}`' if base else 'the defaults'} in {said}.\n\n"
        f"    {antiphon} lineage {run_id} v{config.run.steps}    # what its last version was made from\n"
        f"    {antiphon} replay {run_id}    # repeats its steps and compares every bit\n"
    )


@cache
def _bases() -> tuple[tuple[str, dict[str, str]], ...]:
    tree, found = source_tree(), list[tuple[str, dict[str, str]]]()
    # The quickstart comes first, so that it is named where another example is as near.
    quickstart = tree / "examples" / "quickstart.yaml"
    for path in sorted((tree / "examples").glob("*.yaml"), key=lambda path: (path != quickstart, path.name)):
        with suppress(ConfigError):  # a scenario of the simulator lies there too
            found.append((str(path.relative_to(tree)), flatten_config(load_config(path))))
    return (*found, ("", flatten_config(RunConfig())))
