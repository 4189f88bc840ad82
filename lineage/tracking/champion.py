"""Champion: the registry's name for the best policy that was evaluated in an experiment.

One registered model for each experiment; its alias `champion` moves only to a version that
scored higher than the one it names, so evaluations may come late, twice or in any order. A
version gets its files before the alias, so that `models:/NAME@champion` names something that loads: a
Hugging Face folder, which transformers or vLLM open alone, with an `MLmodel` that says how MLflow does.
"""

import json
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version as installed
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote, urlparse

import yaml

from antiphon.lineage.export import WEIGHTS, Export
from antiphon.lineage.tracking.tracked_run import TrackedRun
from antiphon.system.files import PREFIX

ALIAS = "champion"
SCORE_TAG = "antiphon.reward"
ORIGIN_TAG = "antiphon.policy"
FILES_TAG = "antiphon.files"
"""Tag of a logged model whose files are all there."""
Exporter = Callable[[int, Path], Export | None]
"""Writes a version to a folder that does not exist yet; None when its weights are not kept."""


def crown(
    run: TrackedRun,
    registered: str,
    version: int,
    reward: float,
    prompts: int,
    export: Exporter | None,
    scratch: Path,
) -> None:
    """Move the alias to a policy version if none has scored as high.

    Args:
        run: the run whose logged model it is.
        registered: name of the registered model; made when there is none.
        version: policy version that was evaluated.
        reward: its held-out reward.
        prompts: held-out prompts it was scored on; kept as a tag, as is the digest of its weights.
        export: writes the version's folder; without it, as in a run with record.dvc=false, the registered
            version has no files.
        scratch: folder for what has to be uploaded.
    """
    model_id = run.models.get(version)
    if model_id is None:
        return
    champion = _champion(run.client, registered)
    origin = f"{run.run_id}/v{version}"
    if champion is not None and float(champion.tags.get(SCORE_TAG, "-inf")) >= reward:
        return
    if export is not None:
        _add_files(run.client, model_id, version, export, scratch)
    wanted = f"name = '{registered}' and tags.`{ORIGIN_TAG}` = '{origin}'"
    made = next(iter(run.client.search_model_versions(wanted, max_results=1)), None)
    if made is None:
        source = run.client.get_logged_model(model_id).artifact_location
        tags = {
            SCORE_TAG: repr(reward),
            ORIGIN_TAG: origin,
            "antiphon.version": str(version),
            "antiphon.prompts": str(prompts),
            "antiphon.weights_digest": run.digests.get(version, ""),
        }
        made = run.client.create_model_version(
            registered, source, run.run_id, tags=tags, model_id=model_id, await_creation_for=0
        )
    run.client.set_registered_model_alias(registered, ALIAS, str(made.version))


def _champion(client: Any, registered: str) -> Any:
    """Return the registered version that the alias names, or None; makes the registered model."""
    from mlflow.exceptions import MlflowException

    try:
        known = client.get_registered_model(registered)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        try:
            client.create_registered_model(
                registered, description="Policies that scored best when evaluated."
            )
        except MlflowException as other:
            if other.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        return None
    number = known.aliases.get(ALIAS)
    return client.get_model_version(registered, str(number)) if number is not None else None


def _add_files(client: Any, model_id: str, policy: int, export: Exporter, scratch: Path) -> None:
    """Give a logged model the files of its version, once, where its weights are kept.

    Where MLflow's artifacts lie on this machine the weights are linked, not copied, if the file system can.
    """
    model = client.get_logged_model(model_id)
    if FILES_TAG in model.tags:
        return
    place = urlparse(model.artifact_location)
    here = Path(unquote(place.path)) if place.scheme in ("", "file") else None
    if here is None or not (here / "MLmodel").is_file():  # else written, but its tag was not confirmed
        beside = scratch if here is None else here.parent
        beside.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=PREFIX, dir=beside) as name:
            folder = Path(name) / "files"
            if export(policy, folder) is None:
                return
            _describe(folder, model_id)
            if here is not None:
                folder.replace(here)
            else:
                client.log_model_artifacts(model_id, str(folder))
    client.set_logged_model_tags(model_id, {FILES_TAG: WEIGHTS})


def _describe(folder: Path, model_id: str) -> None:
    """Write `MLmodel`, and the tokenizer where MLflow looks for one.

    By hand, since `mlflow.models` and its flavour import most of a training environment.
    """
    tokenizer = folder / "components" / "tokenizer"
    tokenizer.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_file() and path.name != WEIGHTS:
            copyfile(path, tokenizer / path.name)
    dtype = json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"]
    opened_by = {
        "task": "text-generation",
        "instance_type": "TextGenerationPipeline",
        "pipeline_model_type": "AutoModelForCausalLM",
        "model_binary": ".",
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
        "torch_dtype": f"torch.{dtype}",
    }
    served_by = {
        "loader_module": "mlflow.transformers",
        "model_binary": ".",
        "python_version": platform.python_version(),
    }
    described = {
        "flavors": {"transformers": opened_by, "python_function": served_by},
        "mlflow_version": installed("mlflow"),
        "model_id": model_id,
        "utc_time_created": str(datetime.now(UTC).replace(tzinfo=None)),
    }
    (folder / "MLmodel").write_text(yaml.safe_dump(described, sort_keys=False), encoding="utf-8")
