"""Asked tensors: which weights a model's configuration asks for, known before anything is loaded.

transformers builds the model without memory for its weights, in a process of its own, since it takes seconds
and a few hundred megabytes to import. The answer depends on config.json alone and is kept where set-up keeps
what it made, so that a run of the same model has it at once.

    python -m antiphon.services.learner.asked_tensors FOLDER      prints it as JSON
"""

import json
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from antiphon.core.capacity.model_shape import frozen_names
from antiphon.core.config_sections import LearnerSection
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError
from antiphon.models.adapters import check_start, chosen_linears, start_folder
from antiphon.models.directory import check_tensors, expected_tensors
from antiphon.models.experts import pieces_in_files
from antiphon.system.files import write_atomically
from antiphon.system.processes import output_of
from antiphon.system.set_up import made_once

ANSWER_S = 180.0
"""Longest wait for transformers to build the model."""


def check_weights(model_dir: Path, learner: LearnerSection | None = None) -> None:
    """Check that a model directory holds the weights that its configuration asks for, in name and shape.

    Raises:
        ConfigError: when it does not, transformers knows no such model, or adapters or frozen parts of
            `learner` are of another one.
    """
    config = (model_dir / "config.json").read_bytes()
    release = metadata.version("transformers")
    kept = made_once(f"modules-{digest_bytes(config)[:16]}-{release}.json")
    text = kept.read_text(encoding="utf-8") if kept.is_file() else ""
    if not text:
        known, text = output_of(__name__, str(model_dir), timeout_s=ANSWER_S)
        if not known:
            raise ConfigError(
                f"model.path={model_dir}: transformers cannot build what config.json describes ({text}); "
                "give a causal language model that it knows"
            )
        with suppress(OSError):  # another user's environment: then the next run asks again
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, text.encode())
    found = json.loads(text)
    asked = {name: tuple(shape) for name, shape in found["asked"].items()}
    have = expected_tensors(model_dir)
    in_files = {name: piece.shape for name, piece in pieces_in_files(asked, have.keys()).items()}
    check_tensors(model_dir, in_files, found["tied"], have)
    if learner is None:
        return
    for kind in learner.freeze:
        if not frozen_names(asked, [kind]):
            raise ConfigError(
                f"learner.freeze names {kind}, but model.path={model_dir} has none; leave it out, or give a "
                "mixture of experts"
            )
    lora = learner.lora
    if lora.rank:
        chosen_linears(lora.targets, found["linears"], asked)
        if lora.start is not None:
            check_start(start_folder(lora.start), lora, asked, str(model_dir))


def main() -> None:
    """Print what a folder's model has: names and shapes, each weight once, further names, linear modules."""
    from antiphon.models.spared_libraries import spare_unused_libraries

    spare_unused_libraries()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from antiphon.services.learner.adapters import linears_of
    from antiphon.services.learner.policy import published_names

    config = AutoConfig.from_pretrained(sys.argv[1], local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = model.state_dict(keep_vars=True)
    names = published_names(model)
    first = {id(tensors[name]): name for name in names}
    asked = {name: list(tensors[name].shape) for name in names}
    tied = {name: first[id(tensor)] for name, tensor in tensors.items() if name not in asked}
    print(json.dumps({"asked": asked, "tied": tied, "linears": linears_of(model)}))


if __name__ == "__main__":
    main()
