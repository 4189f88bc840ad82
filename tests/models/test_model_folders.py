"""Model folders that people have: what does not fit together is named before anything starts."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError
from antiphon.models.codec import TextCodec
from antiphon.models.directory import (
    INDEX,
    check_parts,
    check_pointers,
    check_tensors,
    end_tokens,
    end_tokens_by_file,
    expected_tensors,
    model_digest,
    most_positions,
    weight_files,
)
from antiphon.models.rendering import Renderer

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "chain-sum"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def change(folder: Path, name: str, **values: object) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def renderer_of(folder: Path) -> Renderer:
    return Renderer.load(RunConfig.model_validate({"model": {"path": str(folder)}}))


def rewrite(folder: Path, work: Callable[[Tensors], Mapping[str, Any]]) -> None:
    """Put other tensors into the folder's file."""
    weights = folder / "model.safetensors"
    save_file({name: np.ascontiguousarray(t) for name, t in work(load_file(weights)).items()}, weights)


def split(folder: Path) -> None:
    """Replace the one file by two and an index."""
    weights = folder / "model.safetensors"
    tensors, where = load_file(weights), {}
    weights.unlink()
    for part in range(2):
        names = sorted(tensors)[part::2]
        save_file({name: tensors[name] for name in names}, folder / f"part-{part}.safetensors")
        where |= dict.fromkeys(names, f"part-{part}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def check(folder: Path) -> None:
    """Compare with what the configuration asks for, which is what the shipped file holds."""
    check_tensors(folder, expected_tensors(MODEL), {HEAD: EMBEDDING}, expected_tensors(folder))


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (
            lambda t: {k: v for k, v in t.items() if "layers.2.mlp" not in k},
            r"do not fit its config\.json: model\.layers\.2\.mlp.* is missing, .* copy the model again",
        ),
        (
            lambda t: t | {"model.norm.weight": np.ones(64, np.float32)},
            r"model\.norm\.weight has shape \[64\] where config\.json asks for \[128\]",
        ),
        (
            lambda t: t | {HEAD: t[EMBEDDING] + 1},
            r"lm_head\.weight is not model\.embed_tokens\.weight \(.*to false",
        ),
        (lambda t: t | {"model.extra": t["model.norm.weight"]}, r"model\.extra has no place in the model"),
        (
            lambda t: {k.removeprefix("model."): v for k, v in t.items()},
            r"model\.embed_tokens\.weight is missing, .*, 67 more, norm\.weight has no place",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_configuration_are_named(
    folder: Path, work: Callable[[Tensors], Tensors], said: str
) -> None:
    check(folder)
    rewrite(folder, work)
    with pytest.raises(ConfigError, match=said):
        check(folder)


def test_a_head_that_is_the_embedding_may_stand_in_the_file_and_one_that_is_missing_is_named(
    folder: Path,
) -> None:
    rewrite(folder, lambda tensors: tensors | {HEAD: tensors[EMBEDDING].copy()})
    check(folder)
    split(folder)
    check(folder)
    asked = expected_tensors(MODEL) | {HEAD: (64, 128)}
    with pytest.raises(ConfigError, match=r"lm_head\.weight is missing \(.*tie_word_embeddings to true"):
        check_tensors(MODEL, asked, {}, expected_tensors(MODEL))


def test_with_an_index_only_its_files_count(folder: Path) -> None:
    split(folder)
    before = model_digest(folder), expected_tensors(folder)
    stray = folder / "consolidated.safetensors"
    save_file({"tok_embeddings.weight": np.zeros(3, np.float32)}, stray)
    assert (model_digest(folder), expected_tensors(folder)) == before
    check(folder)
    (folder / INDEX).unlink()
    with pytest.raises(ConfigError, match=r"consolidated\.safetensors.*which no index names; move it away"):
        weight_files(folder)


def test_two_sets_of_weights_are_refused(folder: Path) -> None:
    split(folder)
    shutil.copy(MODEL / "model.safetensors", folder)
    with pytest.raises(ConfigError, match="an index that names other files; move one"):
        expected_tensors(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_named(folder: Path, name: str) -> None:
    check_pointers(folder)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3620352\n")
    with pytest.raises(ConfigError, match=rf"{name} is a pointer of git-lfs.*git lfs pull"):
        check_pointers(folder)


def test_the_end_tokens_of_all_files_end_an_answer(folder: Path) -> None:
    assert end_tokens(folder) == (1,)
    change(folder, "generation_config.json", eos_token_id=[2])
    change(folder, "config.json", eos_token_id=3)
    assert end_tokens(folder) == (1, 2, 3)
    named = {"tokenizer_config.json": (1,), "generation_config.json": (2,), "config.json": (3,)}
    assert end_tokens_by_file(folder) == named
    codec = TextCodec.load(str(folder))
    one = codec.encode("1")
    assert codec.decode([*one, 1, 2, 3]) == codec.decode(one)


def test_a_chat_template_of_null_is_none(folder: Path) -> None:
    plain = renderer_of(folder).encode_prompt("1+2=")
    change(folder, "tokenizer_config.json", chat_template=None)
    assert renderer_of(folder).encode_prompt("1+2=") == plain


def test_a_chat_model_without_a_template_is_refused_unless_asked_for(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODEL.with_name("turns"), tmp_path / "model"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"ends turns with <\|im_end\|> but has no chat template; copy "):
        renderer_of(folder)
    change(folder, "tokenizer_config.json", chat_template=None)
    assert renderer_of(folder).encode_prompt("1+2") == renderer_of(folder).codec.encode("1+2")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}\n{{ m.content ", r"\(line 2: unexpected end"),
        ("{{ raise_exception('a system turn is needed') }}", r"\(a system turn is needed\)"),
        ("{{ messages[0].content + 1 }}", "chat template fails"),
    ],
)
def test_a_chat_template_that_fails_is_named_with_its_fault(folder: Path, template: str, said: str) -> None:
    change(folder, "tokenizer_config.json", chat_template=template)
    with pytest.raises(ConfigError, match=said):
        renderer_of(folder).encode_prompt("1+2=")


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({}, None),
        ({"max_position_embeddings": 128}, 128),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": 128, "rope_scaling": {"type": "linear", "factor": 4.0}}, 512),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 512),
    ],
)
def test_positions_are_counted_as_the_engine_counts_them(
    tmp_path: Path, config: dict[str, object], positions: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert most_positions(tmp_path) == positions


@pytest.mark.parametrize(
    ("parts", "changes", "words"),
    [
        (1, {"model_type": "mamba"}, ""),
        (2, {}, ""),
        (4, {}, ""),  # two copies of each of the two key-value heads
        (3, {}, "does not divide the 4 attention heads of model.path={}; set it to 2"),
        (4, {"intermediate_size": 250}, "does not divide the 250 numbers between the halves of an MLP"),
        (8, {"num_attention_heads": 8, "num_key_value_heads": 3}, "does not divide the 3 key-value heads"),
        (2, {"model_type": "mamba"}, "needs a model whose layers are known to be cut into parts"),
    ],
)
def test_a_model_is_cut_where_each_layer_can_be(
    tmp_path: Path, parts: int, changes: dict[str, object], words: str
) -> None:
    source = Path(__file__).resolve().parents[2] / "examples/models/chain-sum/config.json"
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(source.read_text()), **changes}))
    if not words:
        return check_parts(tmp_path, parts)
    with pytest.raises(ConfigError, match=re.escape(words.format(tmp_path))):
        check_parts(tmp_path, parts)
