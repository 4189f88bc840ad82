"""Model files: what MLflow needs beside a Hugging Face folder, so that `models:/NAME@champion` loads.

The folder stays what it is: it opens after a download with transformers or vLLM alone. `MLmodel` says
how MLflow's own transformers flavour opens it.
"""

import json
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote, urlparse

import yaml

from antiphon.lineage.export import WEIGHTS, Export
from antiphon.system.files import PREFIX

Exporter = Callable[[int, Path], Export | None]
"""Writes a version to a folder that does not exist yet; None when its weights are not kept."""
FILES_TAG = "antiphon.files"
"""Tag of a logged model whose files are all there."""


def add_files(client: Any, model_id: str, policy: int, export: Exporter, scratch: Path) -> bool:
    """Give a logged model the files of its version, once; tell whether it has them.

    Where MLflow's artifacts lie on this machine the weights are linked, not copied, if the file system can.

    Args:
        client: MLflow's client.
        model_id: the logged model.
        policy: its policy version.
        export: writes the version's folder.
        scratch: folder for what has to be uploaded.
    """
    model = client.get_logged_model(model_id)
    if FILES_TAG in model.tags:
        return True
    place = urlparse(model.artifact_location)
    here = Path(unquote(place.path)) if place.scheme in ("", "file") else None
    found = here is not None and (here / "MLmodel").is_file()  # written, but its tag was not confirmed
    if not found:
        beside = scratch if here is None else here.parent
        beside.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=PREFIX, dir=beside) as name:
            folder = Path(name) / "files"
            found = export(policy, folder) is not None
            if found:
                _describe(folder, model_id)
                if here is not None:
                    folder.replace(here)
                else:
                    client.log_model_artifacts(model_id, str(folder))
    if found:
        client.set_logged_model_tags(model_id, {FILES_TAG: WEIGHTS})
    return found


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
        "mlflow_version": version("mlflow"),
        "model_id": model_id,
        "utc_time_created": str(datetime.now(UTC).replace(tzinfo=None)),
    }
    (folder / "MLmodel").write_text(yaml.safe_dump(described, sort_keys=False), encoding="utf-8")
