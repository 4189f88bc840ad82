"""The codec refuses what does not match and gives back what it was given."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError
from antiphon.models.codec import StopStrings, TextCodec, resolve_model_path
from antiphon.models.rendering import Renderer

ALPHABET = "0123456789+-= "
SPECIALS = ["<pad>", "<end>"]


def write_model(
    folder: Path,
    vocab_size: int | None = None,
    eos_token: object = "<end>",
    template: str | None = None,
    **config: object,
) -> str:
    words = {token: index for index, token in enumerate([*SPECIALS, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIALS)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tree: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if eos_token is not None:
        tree["eos_token"] = eos_token
    if template is not None:
        tree["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(tree))
    size = len(words) if vocab_size is None else vocab_size
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": size, **config}))
    return str(folder)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.load(write_model(tmp_path_factory.mktemp("model")))


@given(st.text(alphabet=ALPHABET, min_size=1, max_size=40))
def test_text_survives_the_round_trip(codec: TextCodec, text: str) -> None:
    ids = codec.encode(text)
    assert codec.decode(ids) == text
    assert all(0 <= i < codec.vocabulary_size for i in ids)


def test_decode_drops_specials_and_ids_the_model_does_not_have(codec: TextCodec) -> None:
    ids = [*codec.encode("1+2"), codec.end_token_id, 0, 10_000, -3]
    assert codec.decode(np.asarray(ids, dtype=np.int32)) == "1+2"


@given(st.text(alphabet=ALPHABET + "xé", min_size=1, max_size=40))
def test_what_the_tokenizer_has_no_token_for_is_lost(codec: TextCodec, text: str) -> None:
    assert codec.lost_characters(text) == [i for i, character in enumerate(text) if character in "xé"]


def test_characters_that_a_tokenizer_leaves_out_are_lost_too() -> None:
    """Without an unknown token some tokenizers drop what they do not know in silence."""
    tokenizer = Tokenizer(models.BPE({"<end>": 0, "1": 1, "2": 2}, []))
    assert TextCodec(tokenizer, [0], 3).lost_characters("1x2 1") == [1]


def test_a_tokenizer_of_bytes_loses_nothing() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert TextCodec(tokenizer, [0], len(alphabet)).lost_characters("Zoë says: 你好 🦊\n\t(x)") == []


def test_decode_of_nothing_is_empty(codec: TextCodec) -> None:
    assert codec.decode([]) == ""


def test_a_prompt_without_tokens_is_refused(codec: TextCodec) -> None:
    with pytest.raises(ConfigError, match="no token"):
        Renderer(codec).encode_prompt("")


def test_long_prompts_are_not_cut_by_the_tokenizer_file(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    tokenizer = Tokenizer.from_file(f"{path}/tokenizer.json")
    tokenizer.enable_truncation(4)
    tokenizer.save(f"{path}/tokenizer.json")
    assert len(TextCodec.load(path).encode("1" * 50)) == 50


@pytest.mark.parametrize("eos_token", ["<end>", {"content": "<end>", "special": True}])
def test_end_token_of_the_tokenizer(tmp_path: Path, eos_token: object) -> None:
    assert TextCodec.load(write_model(tmp_path, eos_token=eos_token, eos_token_id=0)).end_token_id == 1


@pytest.mark.parametrize("eos", [1, [1, 0]])
def test_end_token_of_the_model_when_the_tokenizer_names_none(tmp_path: Path, eos: object) -> None:
    assert TextCodec.load(write_model(tmp_path, eos_token=None, eos_token_id=eos)).end_token_id == 1


def test_more_rows_than_tokens_is_usual(tmp_path: Path) -> None:
    assert TextCodec.load(write_model(tmp_path, vocab_size=64)).vocabulary_size == 64


def test_chat_template_frames_the_prompt(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}={{ m['content'] }}={% endfor %}{% if add_generation_prompt %}+{% endif %}"
    )
    path = write_model(tmp_path, template=template)
    renderer = Renderer.load(RunConfig.model_validate({"model": {"path": path}}))
    assert renderer.codec.decode(renderer.encode_prompt("12")) == "=12=+"


def test_mismatched_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*16 tokens.*vocab_size=8"):
        TextCodec.load(write_model(tmp_path, vocab_size=8))


def test_end_token_outside_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*end token 99"):
        TextCodec.load(write_model(tmp_path, eos_token=None, eos_token_id=99))


@pytest.mark.parametrize("eos_token", [None, "<nowhere>"])
def test_missing_end_token_is_refused(tmp_path: Path, eos_token: object) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*no end token"):
        TextCodec.load(write_model(tmp_path, eos_token=eos_token))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, "{not json", "[1]"])
def test_missing_or_broken_files_are_refused(tmp_path: Path, name: str, content: str | None) -> None:
    path = write_model(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=r"model\.path"):
        TextCodec.load(path)


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        TextCodec.load(str(tmp_path / "nowhere"))


def test_existing_folder_is_taken_as_given(tmp_path: Path) -> None:
    assert resolve_model_path(str(tmp_path)) == str(tmp_path)


def test_folder_of_the_project_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = Path(resolve_model_path("models"))
    assert found.is_absolute() and (found / "codec.py").is_file()


def test_hub_name_is_left_alone() -> None:
    assert resolve_model_path("owner/some-model") == "owner/some-model"


@pytest.mark.parametrize("path", ["", "nowhere", "/no/such/folder", "./no/such", "a/b/c"])
def test_what_is_neither_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        resolve_model_path(path)


@pytest.fixture(scope="module")
def byte_codec() -> TextCodec:
    """Each byte is a token, some pairs are too, and so is an end token."""
    signs = pre_tokenizers.ByteLevel.alphabet()
    words = {sign: index for index, sign in enumerate(sorted(signs))}
    merges = [("A", "B"), ("B", "C"), ("Ċ", "Ċ")]
    words |= {"".join(pair): len(words) + index for index, pair in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(words, merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return TextCodec(tokenizer, [len(words)], len(words) + 1)


@given(data=st.data())
def test_a_turn_ends_with_the_token_that_completes_a_text_however_it_arrives(
    byte_codec: TextCodec, data: st.DataObject
) -> None:
    words = ["A", "B", "C", "AB", "BC", "ĊĊ", "Ċ", "Ã", "©", "<end>"]
    ids = [byte_codec.tokenizer.token_to_id(word) for word in words]
    tokens = data.draw(st.lists(st.sampled_from(ids), max_size=80))
    strings = data.draw(st.lists(st.sampled_from(["ABC", "\n\n", "é", "CA", "<end>"]), min_size=1))
    stops = StopStrings(byte_codec, strings)

    def text(size: int) -> str:
        return str(byte_codec.tokenizer.decode(tokens[:size], skip_special_tokens=False))

    expected = next((n for n in range(len(tokens) + 1) if any(one in text(n) for one in strings)), None)
    assert stops.end(tokens) == expected
    known, found = 0, None
    while found is None and known < len(tokens):
        size = known + data.draw(st.integers(1, 9))
        known, found = min(size, len(tokens)), stops.end(tokens[:size], known)
    assert found == expected


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@given(text=st.lists(st.sampled_from(["<s>", "<end>", "<x>", "a", " ", "(end)"]), max_size=12).map("".join))
def test_a_special_token_that_is_text_changes_nothing_around_it(kind: str, text: str) -> None:
    """A tokenizer with a mark for a text's beginning, and special tokens that take the spaces behind them."""
    pieces = ["<s>", "<end>", "?", "▁", *"<>()endsx", "a", "▁a"]
    if kind == "bpe":
        numbers = {piece: number for number, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.BPE(numbers, [("▁", "a")], unk_token="?"))
    else:
        tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens([AddedToken("<s>", rstrip=True), "<x>", "<end>"])
    codec = TextCodec(tokenizer, [1], len(pieces) + 1)
    spelt = {codec.tokenizer.token_to_id(one): codec.tokenizer.token_to_id(two) for one, two in ("<(", ">)")}
    found = codec.encode(text.replace("(end)", codec.shielded("<end>")))
    assert [spelt.get(token, token) for token in found] == list(codec.encode(text))


BYTES = Tokenizer(
    models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
)
BYTES.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
BYTES.decoder = decoders.ByteLevel()


@given(st.text(max_size=20))
def test_the_pieces_of_tokens_are_the_text_also_where_a_character_has_several(text: str) -> None:
    codec = TextCodec(BYTES, [0], 256)
    ids = codec.encode(text)
    pieces = codec.pieces(ids)
    assert "".join(pieces) == text and len(pieces) == len(ids)
    assert "\N{REPLACEMENT CHARACTER}" in text or not any("\N{REPLACEMENT CHARACTER}" in p for p in pieces)


@given(st.lists(st.integers(0, 300), max_size=20))
def test_tokens_that_make_no_text_have_a_piece_each(ids: list[int]) -> None:
    assert len(TextCodec(BYTES, [0], 256).pieces(ids)) == len(ids)
