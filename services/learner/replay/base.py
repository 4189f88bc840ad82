"""Replay base: the model that a replay starts from, found without the machine of the run.

The copy of a run's artifacts holds version 0 as safetensors and the model's configuration, which
together are a model folder. Version 0 has the precision in which it was published; where the
learner began with more than that, only the original folder will do, and it must be the same model.
"""

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.lineage.documents.replay_copy import ReplayCopy
from antiphon.models.codec import resolve_model_path
from antiphon.weights.snapshot import weights_digest

CONFIGURATION = "config.json"
"""What makes the `model` folder of a copy usable."""


def base_model(copy: ReplayCopy, work: Path, given: Path | None = None) -> str:
    """Return the folder of the base model for a learner that replays.

    Args:
        copy: the run's artifacts.
        work: an empty folder that stays as long as the replay.
        given: a folder to take instead; its digest is compared when it is loaded.

    Raises:
        ConfigError: when there is no model to start from.
        IntegrityError: when the copy's version 0 is not the recorded one.
    """
    if given is not None:
        if not (given / CONFIGURATION).is_file():
            raise ConfigError(
                f"--model {given} holds no {CONFIGURATION}; give the folder of the run's base model"
            )
        return str(given)
    # Whether version 0, as published, is all of what the learner began with.
    whole = copy.config.model.dtype == "float32" or copy.config.learner.dtype == "bfloat16"
    if whole and (copy.model / CONFIGURATION).is_file() and copy.weights(0) is not None:
        shutil.copytree(copy.model, work, dirs_exist_ok=True)
        # transformers reads no file that does not say which library it is for.
        save_file(load_version(copy, 0), work / "model.safetensors", metadata={"format": "pt"})
        return str(work)
    try:
        return resolve_model_path(copy.config.model.path)
    except ConfigError as error:
        raise ConfigError(
            f"the artifacts of {copy.run_id} do not hold the base model in the precision the learner began "
            f"with, and {copy.config.model.path} is not here; give its folder with --model"
        ) from error


def load_version(copy: ReplayCopy, version: int, made: Path | None = None) -> dict[str, torch.Tensor]:
    """Return the recorded weights of a version, checked; from the file `made` where they were made again.

    Raises:
        IntegrityError: when they are missing, unreadable, or not what the record names.
    """
    path, wanted = made or copy.weights(version), copy.weights_digest(version)
    if path is None:
        raise IntegrityError(
            f"the weights of version {version} are not in {copy.root}; copy the artifacts again"
        )
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise IntegrityError(
            f"{path} is no readable safetensors file: {error}; restore it from a copy"
        ) from error
    found = weights_digest(tensors)
    if found != wanted:
        raise IntegrityError(
            f"{path} holds weights {found[:12]}, but version {version} was recorded as {wanted[:12]}; "
            "restore it from another copy"
        )
    return tensors
