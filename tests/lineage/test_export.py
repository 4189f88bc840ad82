"""Export: plain transformers loads the folder and decodes what the recorded weights decode."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from antiphon.api.policy_file import copy_policy
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.status import EvaluationRecord
from antiphon.lineage.documents.replay_copy import ReplayCopy, find_copy
from antiphon.lineage.export import choose_version, export_version
from antiphon.lineage.records import Records
from antiphon.weights.snapshot import weights_digest
from tests.support.replay_artifacts import RUN_ID, STEPS, VOCABULARY, TinyRun, make_config, save_model

pytestmark = pytest.mark.engine

TEMPLATE = "{% for m in messages %}w1 {{ m['content'] }} w2{% endfor %}"


def save_tokenizer(folder: Path) -> None:
    words = {"<unk>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), unk_token="<unk>", eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    root = tmp_path_factory.mktemp("export")
    model = save_model(root / "model")
    save_tokenizer(model)
    run = TinyRun(root / "home", make_config(model))
    records = Records(RUN_ID, run.config, run.run_dir, run.home, run.store.root, run.log, run.home)
    for version, reward in ((0, 0.25), (2, 0.75), (3, 0.75), (4, 0.5)):
        run.log.evaluate(EvaluationRecord(version, 16, 16, reward, 5.0))
    assert records.close(60.0).complete
    shutil.rmtree(model)  # as on another machine: the ledger alone must do
    return run


@pytest.fixture
def copy(run: TinyRun) -> ReplayCopy:
    return find_copy(run.ledger, RUN_ID)


def record_in_mlflow(run: TinyRun) -> None:
    """Bring the run into MLflow afterwards, as `antiphon keep --records` does."""
    record = run.config.record.model_copy(update={"mlflow": True, "system_metrics_s": 0.0})
    config = run.config.model_copy(update={"record": record})
    records = Records(RUN_ID, config, run.run_dir, run.home, run.store.root, run.log, run.home)
    report = records.close(120.0)
    assert report.complete, report


def test_mlflows_champion_loads_and_its_weights_lie_on_the_disk_once(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    record_in_mlflow(run)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{run.home}/mlflow/mlflow.db")
    pipeline = mlflow.transformers.load_model("models:/tiny@champion")
    folder = Path(mlflow.artifacts.download_artifacts("models:/tiny@champion"))
    state = {name: t for name, t in pipeline.model.state_dict().items() if name != "lm_head.weight"}
    assert weights_digest(state) == find_copy(run.ledger, RUN_ID).weights_digest(2)
    assert pipeline.tokenizer.chat_template == TEMPLATE
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert greedy(plain, [3, 4, 5]) == greedy(run.policy(2), [3, 4, 5])
    assert "0.7500" in (folder / "README.md").read_text()
    weights = find_copy(run.ledger, RUN_ID).weights(2)
    assert weights is not None and (folder / "model.safetensors").samefile(weights)
    # v0 was the best until v2 was scored; v3 scored no higher, and v4 lower.
    kept = sorted((run.home / "mlflow" / "artifacts").rglob("model.safetensors"))
    assert len(kept) == 2


def greedy(model: Any, prompt: list[int]) -> list[int]:
    out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0)
    return [int(token) for token in out[0]]


@pytest.mark.parametrize("version", [0, 2, STEPS])
def test_plain_transformers_decodes_as_the_recorded_weights(
    run: TinyRun, copy: ReplayCopy, tmp_path: Path, version: int
) -> None:
    found = export_version(copy, version, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    recorded = run.policy(version)
    assert {name: t.dtype for name, t in model.state_dict().items()} == {
        name: t.dtype for name, t in recorded.state_dict().items()
    }
    for prompt in ([3, 4, 5], [7], list(range(20))):
        assert greedy(model, prompt) == greedy(recorded, prompt)
    state = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    assert weights_digest(state) == found.weights_digest == copy.weights_digest(version)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    words = tokenizer.apply_chat_template([{"role": "user", "content": "w7"}], tokenize=False)
    assert words == "w1 w7 w2"


def test_best_is_the_first_of_the_highest_scores(copy: ReplayCopy) -> None:
    assert choose_version(copy, "best") == 2
    assert choose_version(copy, "v4") == choose_version(copy, "4") == 4
    for wrong, word in (("v9", "keeps no weights of version 9"), ("last", "write v12 or best")):
        with pytest.raises(ConfigError, match=word):
            choose_version(copy, wrong)


def test_the_card_names_what_it_came_from(copy: ReplayCopy, tmp_path: Path) -> None:
    export_version(copy, 2, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for words in (RUN_ID, copy.weights_digest(2), copy.weights_digest(0),
                  "0.7500 ± 0.2122 (95%), pass@1 on 16 held-out prompts",
                  f"./antiphon replay {RUN_ID} --to 1", "learner.learning_rate: 0.001"):  # fmt: skip
        assert words in card
    assert card.startswith("---\n")


def test_a_folder_with_something_in_it_is_refused_and_stays(copy: ReplayCopy, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(ConfigError, match="not empty"):
        export_version(copy, 1, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]
    (tmp_path / "out" / "mine").unlink()
    export_version(copy, 1, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_linked_export_is_the_ledgers_own_file(copy: ReplayCopy, tmp_path: Path) -> None:
    export_version(copy, 1, tmp_path / "out", link=True)
    source = copy.weights(1)
    assert source is not None and (tmp_path / "out" / "model.safetensors").samefile(source)


def test_weights_of_another_dtype_are_loaded_as_they_are(copy: ReplayCopy, tmp_path: Path) -> None:
    export_version(copy, 1, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


@pytest.fixture(scope="module")
def altered(run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("altered")
    yield Path(shutil.copytree(run.ledger, root / RUN_ID))


@settings(max_examples=25, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_altered_bit_of_the_weights_leaves_nothing_behind(altered: Path, place: float, bit: int) -> None:
    path = altered / "versions" / "v000001.safetensors"
    sound = path.read_bytes()
    begin = 8 + int.from_bytes(sound[:8], "little")
    broken = bytearray(sound)
    broken[begin + int(place * (len(sound) - begin))] ^= 1 << bit
    refuses(altered, path, bytes(broken))


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"shape":[32,32]', b'"shape":[64,16]'), (b'"F32"', b'"I32"'), (b"model.norm", b"model.nerm")],
)
def test_another_shape_type_or_name_of_a_tensor_is_found(altered: Path, old: bytes, new: bytes) -> None:
    path = altered / "versions" / "v000001.safetensors"
    sound = path.read_bytes()
    assert old in sound
    refuses(altered, path, sound.replace(old, new, 1))
    refuses(altered, path, sound[:-1])
    refuses(altered, path, sound + b"0")
    refuses(altered, path, b"")


def refuses(altered: Path, path: Path, broken: bytes) -> None:
    sound = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(broken)
    try:
        with pytest.raises(IntegrityError, match=re.escape(str(path))):
            export_version(find_copy(altered, RUN_ID), 1, altered.parent / "out")
    finally:
        path.write_bytes(sound)
    assert [entry.name for entry in altered.parent.iterdir()] == [RUN_ID]


def test_a_recorded_file_has_the_digest_of_its_weights(copy: ReplayCopy) -> None:
    for version in range(STEPS + 1):
        path = copy.weights(version)
        assert path is not None
        assert copy_policy(path) == copy.weights_digest(version)


def test_a_run_without_kept_weights_says_so(run: TinyRun, tmp_path: Path) -> None:
    shutil.copytree(run.ledger, tmp_path / RUN_ID, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ConfigError, match="versions with weights are none"):
        choose_version(find_copy(tmp_path / RUN_ID, RUN_ID), "v1")
