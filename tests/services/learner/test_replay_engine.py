"""Replay on the real engine: a copy of the ledger is enough, and whatever is wrong with it has a sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon.cli import app as cli
from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_file
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.replay import steps
from antiphon.services.learner.step import Trainer
from antiphon.weights.snapshot import weights_digest
from tests.support.replay_artifacts import RUN_ID, STEPS, TinyRun, make_config, save_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ledger of a finished run; home, store, journal and the model's folder are gone."""
    root = tmp_path_factory.mktemp("replay")
    run = TinyRun(root / "home", make_config(save_model(root / "model")))
    shutil.copytree(run.ledger, root / "copy" / RUN_ID)
    shutil.rmtree(root / "home")
    shutil.rmtree(root / "model")
    return root / "copy" / RUN_ID


@pytest.fixture
def copy(artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may spoil, and an empty home."""
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path / "empty"))
    place = tmp_path / "copy" / RUN_ID
    shutil.copytree(artifacts, place)
    for path in place.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return place


@pytest.fixture
def replay(copy: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the verb on the copy; it must leave every byte as it was."""

    def run(*arguments: str) -> tuple[int, str, str]:
        before = contents(copy)
        capsys.readouterr()
        code = cli.execute(["replay", RUN_ID, "--copy", str(copy.parent), *arguments])
        said = capsys.readouterr()
        assert contents(copy) == before
        return code, said.out, said.err

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def list_again(folder: Path) -> None:
    """Make a checkpoint whose files were changed look whole."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "contents.json"]
    listed = {str(path.relative_to(folder)): digest_file(path) for path in files}
    (folder / "contents.json").write_text(json.dumps(listed))


def test_every_step_and_logprob_repeats_from_the_copy_alone(replay, tmp_path: Path) -> None:
    code, said, complaint = replay("--rollouts", "--results", str(tmp_path / "out" / "replay.json"))
    assert (code, complaint) == (0, "")
    assert f"{STEPS} of {STEPS} steps of {RUN_ID} repeat bit for bit, from the base model" in said
    found = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert (found["steps"], found["steps_equal_share"], found["first_difference"]) == (STEPS, 1.0, None)
    assert found["logprobs"] > 100 and found["logprobs_equal_share"] == 1.0


def test_a_late_step_starts_at_the_nearest_checkpoint(replay) -> None:
    code, said, _ = replay("--step", "3")
    assert code == 0
    assert "from the checkpoint of version 2" in said and "step 1:" not in said and "step 3:" in said


def test_an_altered_checkpoint_is_passed_over(replay, copy: Path) -> None:
    file = next((copy / "checkpoints" / "v00000002").rglob("*.pt"))
    file.write_bytes(file.read_bytes()[:-1])
    code, said, _ = replay("--step", "3")
    assert code == 0 and "from the base model" in said


def test_a_checkpoint_that_would_run_something_is_never_opened(replay, copy: Path, tmp_path: Path) -> None:
    folder, trace = copy / "checkpoints" / "v00000002", tmp_path / "trace"
    next(folder.rglob("*.pt")).write_bytes(f"cos\nsystem\n(S'touch {trace}'\ntR.".encode())
    list_again(folder)
    code, said, _ = replay("--step", "3")
    assert code == 0 and "from the base model" in said
    assert not trace.exists()


def test_a_checkpoint_of_another_configuration_is_refused(replay, copy: Path, tmp_path: Path) -> None:
    other = make_config(save_model(tmp_path / "other"), learner__learning_rate=5e-4)
    checkpoints = CheckpointStore(tmp_path / "checkpoints", 1)
    trainer = Trainer(other, checkpoints)
    trainer.start(0)
    trainer.version = 2
    trainer.save()
    trainer.stop()
    shutil.rmtree(copy / "checkpoints")
    shutil.copytree(tmp_path / "checkpoints", copy / "checkpoints")
    code, _, complaint = replay("--step", "3")
    assert code == 2 and "belongs to another model, algorithm or learner configuration" in complaint


def test_a_checkpoint_of_another_model_is_refused(replay, copy: Path) -> None:
    folder = copy / "checkpoints" / "v00000002"
    file = next(folder.rglob("*.pt"))
    state = torch.load(file, weights_only=True)
    next(tensor for tensor in state["module"].values() if tensor.dim() == 2).add_(0.5)
    torch.save(state, file)
    list_again(folder)
    code, _, complaint = replay("--step", "3")
    assert code == 1 and "the checkpoint of version 2 has weights" in complaint
    assert "was recorded with" in complaint


def test_ranks_that_do_not_meet_are_not_said_to_be_another_model(
    replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(config: RunConfig) -> None:
        raise RuntimeError("timed out after 3 s,\nwaiting for clients")

    monkeypatch.setattr(steps, "join", join)
    _, _, complaint = replay("--step", "3")
    assert "the ranks of the learner did not meet: timed out after 3 s, waiting for clients" in complaint


def test_another_base_model_is_refused(replay, tmp_path: Path) -> None:
    code, _, complaint = replay("--step", "0", "--model", str(save_model(tmp_path / "other", seed=1)))
    assert code == 1 and "the base model in" in complaint and "--model" in complaint


def test_threads_that_cannot_be_are_refused(replay) -> None:
    code, _, complaint = replay("--threads", "0")
    assert code == 2 and "--threads 0 is not possible" in complaint


def test_another_number_of_threads_is_told(replay) -> None:
    code, said, complaint = replay("--step", "0", "--threads", "2")
    assert "here learner.threads was 1 and is 2" in said
    assert code in (0, 1)
    if code:  # sums in another order: then the first difference names the cause
        assert "learner.threads was 1 and is 2" in complaint


def test_the_first_difference_is_told_in_words(replay, copy: Path) -> None:
    weights = copy / "versions" / "v000002.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][3] += 0.25
    save_file(tensors, weights)
    rewrite(copy / "versions" / "v000002.json", weights_digest=weights_digest(tensors))
    code, said, complaint = replay()
    assert code == 1 and f"{STEPS - 1} of {STEPS} steps" in said
    assert "does not repeat from step 1: version 2" in complaint
    assert "tensor model.norm.weight differs in 1 of 32 elements by at most 0.25" in complaint


def test_another_loss_is_told(replay, copy: Path) -> None:
    pointer = copy / "versions" / "v000001.json"
    rewrite(pointer, metrics={**json.loads(pointer.read_text())["metrics"], "loss": 7.5})
    code, _, complaint = replay("--step", "0")
    assert code == 1 and "step 0: the same weights, but loss was 7.5 and is" in complaint


def test_rollouts_of_altered_weights_are_refused(replay, copy: Path) -> None:
    weights = copy / "versions" / "v000001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    code, _, complaint = replay("--step", "1", "--rollouts")
    assert code == 1 and "v000001.safetensors holds weights" in complaint


def test_what_an_unfinished_run_left_replays_up_to_its_end(replay, copy: Path) -> None:
    (copy / "versions" / f"v{STEPS:06d}.json").unlink()
    (copy / "batches" / f"t{STEPS - 1:06d}.parquet").unlink()
    code, _, complaint = replay()
    assert code == 2 and f"unfinished: {STEPS - 1} of {STEPS} steps" in complaint
    assert "--to 2" in complaint
    assert replay("--to", "2")[0] == 0
