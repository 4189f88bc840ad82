"""Mixtures of experts: published under their files' names, recorded and repeated, trained or frozen."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.ranks.memory import trained_parameters
from antiphon.lineage.documents.replay_copy import find_copy
from antiphon.lineage.export import export_version
from antiphon.lineage.rollout_table import encode_batch
from antiphon.models.directory import expected_tensors
from antiphon.services.learner.asked_tensors import check_weights
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine
from antiphon.services.learner.policy import load_causal_model, load_published
from antiphon.services.learner.replay.steps import Replayer, replay_run
from antiphon.services.learner.step import Trainer
from antiphon.weights.patch_payloads import PayloadChoice, restore_full
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import weights_digest
from tests.services.learner.ranks.test_ranks import rows_of
from tests.support.replay_artifacts import RUN_ID, STEPS, TinyRun, make_config, save_model
from tests.support.small_changes import publisher

pytestmark = pytest.mark.engine
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("mixture"), experts=4)


def trained(model: Path, folder: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], Trainer]:
    """Return the weights of version 2, and the trainer that holds it, with a checkpoint of version 1."""
    trainer = Trainer(make_config(model, learner__warmup_steps=0, **changes), CheckpointStore(folder, 3))
    trainer.start(0)
    trainer.train(0, encode_batch(rows_of(0)))
    trainer.save()
    return trainer.train(1, encode_batch(rows_of(1))).weights.copies(), trainer


@pytest.mark.parametrize("stage", [0, 3])
def test_a_snapshot_is_the_file_and_none_of_it_is_copied(model: Path, stage: int) -> None:
    engine, file = DeepSpeedEngine(make_config(model, learner__zero_stage=stage)), load_file(
        model / "model.safetensors"
    )  # fmt: skip
    check_weights(model)
    weights = engine.weights()
    assert {entry.name: entry.shape for entry in weights.entries} == expected_tensors(model)
    assert weights.digest() == weights_digest(file)
    with weights.reading(), weights.tensor(DOWN) as tensor:
        fused = engine._engine.module.causal_model.model.layers[1].mlp.experts.down_proj
        assert torch.equal(tensor, file[DOWN])
        assert tensor.untyped_storage().data_ptr() == fused.data.untyped_storage().data_ptr()
    engine.close()


def test_published_tensors_fill_a_model_and_others_are_refused(model: Path, tmp_path: Path) -> None:
    tensors = load_file(save_model(tmp_path, seed=1, experts=4) / "model.safetensors")
    filled, theirs = (load_causal_model(str(path), torch.float32, False) for path in (model, tmp_path))
    load_published(filled, tensors)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(filled.state_dict()[name], tensor), name
    for changed in ({"model.extra": tensors[DOWN]}, {DOWN: tensors[DOWN].T}):
        with pytest.raises(IntegrityError, match=f"there is a tensor {next(iter(changed))} that the base"):
            load_published(filled, tensors | changed)


def test_a_recorded_run_is_repeated_scored_again_and_exported(model: Path, tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "home", make_config(model))
    copy = find_copy(run.ledger, RUN_ID)
    replayer = Replayer(copy, rollouts=True)
    try:
        summary = replay_run(replayer, range(STEPS), rollouts=True)
    finally:
        replayer.close()
    assert summary.equal and summary.steps_equal_share == 1.0, summary
    assert len(summary.logprobs) == STEPS
    export_version(copy, STEPS, tmp_path / "out")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in run.policy(STEPS).state_dict().items():
        assert torch.equal(opened[name], tensor), name


@pytest.mark.parametrize(
    ("freeze", "stage"), [((), 0), (("experts",), 0), (("routers",), 3), (("experts", "routers"), 2)]
)
def test_what_is_frozen_stays_and_all_else_trains(
    model: Path, tmp_path: Path, freeze: tuple[str, ...], stage: int
) -> None:
    after, trainer = trained(model, tmp_path, learner__freeze=freeze, learner__zero_stage=stage)
    changed = {name for name, tensor in load_file(model / "model.safetensors").items()
               if not torch.equal(tensor, after[name])}  # fmt: skip
    experts, routers = ({name for name in after if part in name} for part in (".experts.", "mlp.gate."))
    frozen = set().union(*({"experts": experts, "routers": routers}[kind] for kind in freeze))
    assert experts and routers and changed == after.keys() - frozen
    tensors = {name: tuple(tensor.shape) for name, tensor in after.items()}
    expected = sum(int(np.prod(shape)) for name, shape in tensors.items() if name not in frozen)
    assert trained_parameters(trainer._config.learner, tensors) == expected
    trainer.start(1)
    again = trainer.train(1, encode_batch(rows_of(1))).weights.copies()
    assert all(torch.equal(again[name], tensor) for name, tensor in after.items())
    trainer.stop()


def test_a_patch_makes_the_next_version_of_the_one_before(model: Path, tmp_path: Path) -> None:
    store = PayloadStore(tmp_path / "origin")
    choice = PayloadChoice(ladder=(1,), most_share=1.0, compress_full=False, threads=1)
    made = publisher(store, choice)
    _, trainer = trained(model, tmp_path / "checkpoints", learner__freeze=["experts"])
    for version, held in ((1, trainer.start(1)), (2, trainer.train(1, encode_batch(rows_of(1))))):
        made.write(version, held.weights, lambda length: None)
        manifest = made.manifest(version, "host:1")
    _, patch = manifest.payloads
    assert patch.parent == 1 and patch.payload_bytes < manifest.payloads[0].payload_bytes
    expected = store.path(manifest.payloads[0].digest).read_bytes()
    store.drop(manifest.payloads[0].digest)
    restore_full(store, manifest, patch, store.manifest(1), threads=1)
    assert store.path(manifest.payloads[0].digest).read_bytes() == expected
    trainer.stop()


def test_adapters_leave_experts_and_routers_and_count_none_of_them(model: Path, tmp_path: Path) -> None:
    after, trainer = trained(model, tmp_path, learner__lora={"rank": 2})
    changed = {name for name, tensor in load_file(model / "model.safetensors").items()
               if not torch.equal(tensor, after[name])}  # fmt: skip
    assert changed == {name for name in after if "self_attn" in name and name.endswith("_proj.weight")}
    held = [one for one in trainer._engine._engine.module.parameters() if one.requires_grad]
    tensors = {name: tuple(tensor.shape) for name, tensor in after.items()}
    assert trained_parameters(trainer._config.learner, tensors) == sum(one.numel() for one in held)
    trainer.stop()


def test_parts_that_a_model_lacks_are_named_before_anything_starts(model: Path, tmp_path: Path) -> None:
    learner = make_config(model, learner__freeze=["routers"]).learner
    check_weights(model, learner)
    with pytest.raises(ConfigError, match=r"learner\.freeze names routers, but model\.path=.* has none"):
        check_weights(save_model(tmp_path / "dense"), learner)
    both = make_config(model, learner__freeze=["experts"], learner__lora={"rank": 4})
    assert [said.partition(";")[0] for said in both.learner.idle_keys()] == [
        "learner.freeze cannot act with learner.lora.rank above 0, where no other weight trains"
    ]


def test_a_file_that_lacks_an_experts_matrix_is_refused_by_its_name(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = save_model(tmp_path / "lacking", experts=4)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(DOWN)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{DOWN} is missing"):
        check_weights(folder)
