"""Supervised rows: what the assistant wrote, and nothing else, is learned, in the form of ten templates."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from antiphon.benchmarks.parts.chat_masks import (
    CONVERSATIONS,
    TEMPLATES,
    TOOLS,
    chatml,
    make_tokenizer,
    masks,
    reader,
)
from antiphon.core.errors import ConfigError
from antiphon.models.codec import TextCodec
from antiphon.models.supervised import SupervisedReader, SupervisedRow, SupervisedRows
from antiphon.system.rows import Rows


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one turn", "tools and turns"])
def test_the_mask_is_the_templates_own(tokenizer: PreTrainedTokenizerFast, name: str, messages: Any) -> None:
    row = reader(tokenizer, TEMPLATES[name]).row({"messages": messages, "tools": TOOLS})
    (ours, mask), (ids, theirs) = masks(tokenizer, name, messages)
    assert len(row.token_ids) == len(theirs) and mask == theirs
    texts = [tokenizer.decode(one).replace("<|im_end|>", "<?im_end?>") for one in (ours, ids)]
    assert texts[0] == texts[1]
    (last_turn,) = (
        reader(tokenizer, TEMPLATES[name], "last").row({"messages": messages, "tools": TOOLS}).learned
    )
    assert last_turn == row.learned[-1]


@given(
    texts=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\ufdd0"), min_size=1), min_size=1, max_size=4
    )
)
def test_what_is_learned_is_what_the_assistant_wrote(
    tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> None:
    messages = [
        one
        for text in texts
        for one in ({"role": "user", "content": "?"}, {"role": "assistant", "content": text})
    ]
    row = reader(tokenizer, TEMPLATES["chatml"]).row({"messages": messages})
    ids = list(row.token_ids)
    assert [tokenizer.decode(ids[start : stop - 1]) for start, stop in row.learned] == texts
    made = row.batch_row(7, 3)
    assert made.sampled_tokens == row.learned_tokens
    assert [*made.prompt_token_ids, *made.token_ids] == ids


FORGETFUL = chatml().replace("{{ m.content or '' }}", "{{ m.content if loop.last else 'gone' }}")
SILENT = chatml().replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "{{ 'x' if add_generation_prompt }}"
)


@pytest.mark.parametrize(
    ("template", "row", "said"),
    [
        ("chatml", {"prompt": "1"}, "`prompt` and `completion` are not both text"),
        ("chatml", {"prompt": "1", "completion": ""}, "`prompt` and `completion` are not both text"),
        ("chatml", {"messages": [{"role": "robot", "content": "1"}]}, "the role 'robot'; use one of system"),
        ("chatml", {"messages": [{"role": "user"}]}, "neither text in `content` nor"),
        (
            "chatml",
            {"messages": [{"role": "user", "content": "1"}]},
            "none of its messages is the assistant's",
        ),
        ("chatml", {"messages": "1"}, "`messages` must be a list of objects"),
        ("chatml", {"messages": CONVERSATIONS[0], "tools": "[]"}, "`tools` must be a list of objects"),
        ("chatml", {"prompt": "1" * 99, "completion": "2"}, "more than 60, the smaller of data.max_tokens"),
        (FORGETFUL, {"messages": CONVERSATIONS[1][3:]}, "cannot be masked; use data.turns=last"),
        (SILENT, {"messages": CONVERSATIONS[0]}, "cannot be masked; give another template"),
    ],
)
def test_a_row_that_cannot_be_learned_from_is_named(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, template: str, row: dict[str, Any], said: str
) -> None:
    file = tmp_path / "rows.jsonl"
    good = {"prompt": "1", "completion": "2"}
    file.write_text("".join(json.dumps(one) + "\n" for one in (good, row)))
    most = 60 if "max_tokens" in said else 4096
    made = reader(tokenizer, TEMPLATES.get(template, template), max_tokens=most)
    with pytest.raises(ConfigError) as caught:
        list(made.read(Rows([file]), "data.train"))
    assert (
        said in str(caught.value)
        and str(caught.value).startswith("data.train: ")
        and f"row {1 if template is SILENT else 2}" in str(caught.value)  # the first is good elsewhere
    )


def test_what_a_table_has_no_value_for_is_as_if_it_were_not_there(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    asking = chatml().replace("{% for m in messages %}", "{% for m in messages %}{{ 'x' if 'name' in m }}")
    plainly = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    named = [{"role": "user", "content": "1", "name": "a"}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": named}, {"prompt": "1", "completion": "2"}, {"messages": plainly}]
    columns = {name: [row.get(name) for row in rows] for name in ("messages", "prompt", "completion")}
    pq.write_table(pa.Table.from_pydict(columns), table := tmp_path / "rows.parquet")
    (lines := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = reader(tokenizer, asking)
    found, wanted = (list(made.read(Rows([file], ()), "data.train")) for file in (table, lines))
    assert asking != chatml() and [one.token_ids.tolist() for one in found] == [
        one.token_ids.tolist() for one in wanted
    ]
    assert found[0].token_ids.size == found[1].token_ids.size + 1 == found[2].token_ids.size + 1


@pytest.mark.parametrize(
    "row", [{"prompt": "1 + Q =", "completion": "3"}, {"prompt": "1", "completion": "Q"}]
)
def test_what_the_tokenizer_has_no_token_for_is_not_learned_as_something_else(
    tmp_path: Path, row: dict[str, str]
) -> None:
    codec = TextCodec.load(str(Path(__file__).parents[2] / "examples" / "models" / "chain-sum"))
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1 + 2 =\n", "completion": "3"}) + "\n" + json.dumps(row))
    with pytest.raises(ConfigError, match=r"row 2 of .* has no token for 'Q' in '"):
        list(SupervisedReader(codec, None, codec.end_tokens).read(Rows([file]), "data.train"))


def test_without_a_template_prompts_with_completions_are_plain_text(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ends = tokenizer.convert_tokens_to_ids(["</s>"])
    codec = TextCodec(tokenizer.backend_tokenizer, ends, len(tokenizer))
    made = SupervisedReader(codec, None, ends)
    row = made.row({"prompt": "1 + 2 = ", "completion": "3"})
    assert tokenizer.decode(row.token_ids) == "1 + 2 = 3</s>" and row.learned == ((8, 10),)
    with pytest.raises(ConfigError, match="has no chat template"):
        made.row({"messages": CONVERSATIONS[0]})


TURN_LENGTHS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3)
"""Of a row's turns: tokens that are only read, and those that are learned then."""


@given(lengths=st.lists(TURN_LENGTHS, max_size=6))
def test_rows_come_out_of_flat_arrays_as_they_went_in(lengths: list[list[tuple[int, int]]]) -> None:
    rows = []
    for turns in lengths:
        ends = np.cumsum(turns).reshape(-1, 2)
        learned = tuple((int(start), int(stop)) for start, stop in ends)
        rows.append(SupervisedRow(np.arange(int(ends[-1, 1]), dtype=np.int32), learned))
    held = SupervisedRows(rows)
    assert [(row.token_ids.tolist(), row.learned) for row in held] == [
        (row.token_ids.tolist(), row.learned) for row in rows
    ]
    assert held.learned_tokens == sum(row.learned_tokens for row in rows)
    assert held.digest() == SupervisedRows(rows).digest()
    assert not rows or held.digest() != SupervisedRows(rows[1:]).digest()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_a_file_take_few_bytes_a_token(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, suffix: str
) -> None:
    """What is held is tokens, not Python's numbers; reading holds no file and no second copy of them."""
    rows = [{"prompt": f"{number}? " * 60, "completion": "yes " * 60} for number in range(300)]
    file = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    del rows
    made = reader(tokenizer, TEMPLATES["chatml"])
    made.row({"prompt": "1", "completion": "2"})  # what is made once is there
    files, arrow = Rows([file], ()), pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        held = SupervisedRows(made.read(files, "data.train"))
        now, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tokens = sum(len(row.token_ids) for row in held)
    print(f"{tokens} tokens, {now / tokens:.2f} bytes each held, {most / tokens:.2f} at most")
    assert len(held) == 300 and tokens > 140_000
    assert now / tokens < 4.5 and most / tokens < 9
    assert pa.total_allocated_bytes() - arrow < 1 << 20
