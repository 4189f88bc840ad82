"""Runs with adapters: exported whole or for peft, made again without a step, repeated exactly, built on."""

import copy
import shutil
from pathlib import Path

import pytest
import torch

from antiphon.api.policy_file import copy_policy
from antiphon.cli.app import execute
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.lineage.documents.replay_copy import find_copy
from antiphon.lineage.export import ADAPTER_BASE, check_adapter_base
from antiphon.models.directory import weight_files
from antiphon.runs import preflight
from antiphon.runs.preflight import check_model
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.replay.steps import Replayer, replay_run, weights_of
from antiphon.services.learner.step import Trainer
from tests.support.replay_artifacts import RUN_ID, STEPS, TinyRun, make_config, run_of_few_weights, save_model

pytestmark = pytest.mark.engine
LORA = {"rank": 4, "alpha": 6.0, "targets": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return run_of_few_weights(tmp_path_factory.mktemp("adapters"), learner__lora=LORA)


@pytest.fixture(autouse=True)
def home(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(run.home))


@pytest.fixture
def adapter(run: TinyRun, tmp_path: Path) -> Path:
    """The last version's adapter, as a folder."""
    assert execute(["export", RUN_ID, f"v{STEPS}", str(tmp_path / "adapter"), "--adapter"]) == 0
    return tmp_path / "adapter"


def test_version_0_is_the_base_and_the_others_change_the_targets_alone(run: TinyRun, tmp_path: Path) -> None:
    plain = make_config(Path(run.config.model.path))
    trainer = Trainer(plain, CheckpointStore(tmp_path, 1))
    found = find_copy(run.ledger, RUN_ID)
    assert trainer.start(0).weights.digest() == found.weights_digest(0)
    trainer.stop()
    before, after = run.policy(0).state_dict(), run.policy(STEPS).state_dict()
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "down_proj"}


def test_a_checkpoint_holds_adapters_alone_though_the_head_is_tied(run: TinyRun) -> None:
    (file,) = (run.run_dir / "checkpoints" / f"v{STEPS:08d}").rglob("*model_states.pt")
    held = torch.load(file, weights_only=False)["module"]
    assert held and all("lora_" in name for name in held)


def test_a_version_that_is_not_kept_is_merged_not_trained_again(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = find_copy(run.ledger, RUN_ID)
    assert (found.published(), found.recorded_by_digest()) == ([0, 3, 4], [1, 2])
    assert execute(["export", RUN_ID, "v2", str(tmp_path / "out")]) == 0
    assert "to repeat" not in capsys.readouterr().out
    assert copy_policy(tmp_path / "out" / "model.safetensors") == found.weights_digest(2)


def test_peft_opens_an_exported_adapter_and_computes_what_the_merged_weights_do(
    run: TinyRun, adapter: Path
) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(copy.deepcopy(run.policy(0)), str(adapter)).eval()
    assert model.peft_config["default"].r == 4
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        apart = model(tokens).logits - run.policy(STEPS)(tokens).logits
        moved = run.policy(3)(tokens).logits - run.policy(STEPS)(tokens).logits
    assert float(apart.abs().max()) <= 1e-5 < float(moved.abs().max())
    assert run.config.model.path in (adapter / "README.md").read_text()


def test_an_exported_adapter_says_for_which_weights_it_was_made(
    run: TinyRun, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "end_tokens_by_file", lambda model: {})  # it has no tokenizer
    model = Path(run.config.model.path)
    lora = {**LORA, "start": str(adapter)}
    started = make_config(model, learner__lora=lora, rollout__max_model_tokens=64)
    assert not any("lora" in note for note in check_model(started, model))
    other = save_model(tmp_path / "other", seed=1)
    with pytest.raises(
        ConfigError, match=rf"start={adapter} was made for a model.safetensors .*{other} has \w+; give"
    ):
        check_model(started, other)
    for malformed in ("[]", "{", '{"files": 3}'):
        (adapter / ADAPTER_BASE).write_text(malformed)
        with pytest.raises(ConfigError, match=rf"start={adapter}: adapter_base.json cannot be read"):
            check_model(started, model)
    (adapter / ADAPTER_BASE).unlink()  # as peft writes it
    (said,) = check_model(started, other)
    assert f"start={adapter} does not say that it was made for the files of model.path={other}" in said


def test_weights_in_other_files_are_a_note(run: TinyRun, adapter: Path, tmp_path: Path) -> None:
    run.policy(0).save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(weight_files(tmp_path / "sharded")) > 1
    assert len(check_adapter_base(adapter, tmp_path / "sharded")) == 1


def test_the_base_has_no_adapter_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["export", RUN_ID, "v0", str(tmp_path / "out"), "--adapter"]) == 2
    assert "version 0 of run tiny-s0-1 has no adapter in its ledger" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_run_is_repeated_exactly_from_its_artifacts(run: TinyRun) -> None:
    replayer = Replayer(find_copy(run.ledger, RUN_ID))
    try:
        summary = replay_run(replayer, range(STEPS), rollouts=False)
    finally:
        replayer.close()
    assert [check.found_digest for check in summary.steps] == [
        check.recorded_digest for check in summary.steps
    ]
    assert len(summary.steps) == STEPS


def test_an_altered_adapter_makes_nothing(run: TinyRun, tmp_path: Path) -> None:
    shutil.copytree(run.ledger, tmp_path / RUN_ID)
    file = tmp_path / RUN_ID / "versions" / "v000002.adapter.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.unlink()
    file.write_bytes(data)
    with (
        pytest.raises(IntegrityError, match=r"makes weights .* but version 2 was recorded with"),
        weights_of(find_copy(tmp_path, RUN_ID), 2, None, print),
    ):
        pass


def test_a_run_goes_on_from_an_adapter_and_needs_it_no_more_to_be_repeated(
    run: TinyRun, adapter: Path, tmp_path: Path
) -> None:
    started = make_config(
        Path(run.config.model.path), learner__lora=LORA | {"start": str(adapter)}, record__checkpoint_stride=0
    )
    second = TinyRun(tmp_path / "home", started)
    shutil.rmtree(adapter)
    found = find_copy(second.ledger, RUN_ID)
    # The base is what the first run ended with, to the bit.
    assert found.weights_digest(0) == find_copy(run.ledger, RUN_ID).weights_digest(STEPS)
    replayer = Replayer(found)
    try:
        summary = replay_run(replayer, range(STEPS), rollouts=False)
    finally:
        replayer.close()
    assert all(check.found_digest == check.recorded_digest for check in summary.steps)
