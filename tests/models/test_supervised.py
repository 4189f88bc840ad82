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

from antiphon.core.errors import ConfigError
from antiphon.models.chat_template import ChatTemplate
from antiphon.models.codec import TextCodec
from antiphon.models.supervised import SupervisedReader, SupervisedRow, SupervisedRows
from antiphon.system.rows import Rows

WORDS = ("<|im_end|>", "</s>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<eos>")
"""End tokens of the forms below; each is one token here."""
CALLS = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
TURN = "{% generation %}{{ m.content or '' }}" + CALLS + "END{% endgeneration %}"
LOOP = (
    "{% for m in messages %}{% if m.role == 'assistant' %}HEAD"
    + TURN
    + "TAIL{% else %}OTHER{% endif %}{% endfor %}"
)


def form(head: str, end: str, other: str, prompt: str, tail: str = "", before: str = "") -> str:
    text = before + LOOP + "{% if add_generation_prompt %}PROMPT{% endif %}"
    for name, value in (("HEAD", head), ("END", end), ("OTHER", other), ("PROMPT", prompt), ("TAIL", tail)):
        text = text.replace(name, value)
    return text


def chatml(before: str = "") -> str:
    other = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    return form("<|im_start|>assistant\n", "<|im_end|>", other, "<|im_start|>assistant\n", "\n", before)


TEMPLATES = {
    "chatml": chatml(),
    "chatml with tools": chatml(
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    ),
    "llama 3": form(
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        before="<|begin_of_text|>",
    ),
    "mistral": form(" ", "</s>", "[INST] {{ m.content }} [/INST]", " ", before="<s>"),
    "gemma": form(
        "<start_of_turn>model\n",
        "<end_of_turn>",
        "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n",
        "<start_of_turn>model\n",
        "\n",
    ),
    "phi 3": form(
        "<|assistant|>\n", "<|end|>", "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n", "\n"
    ),
    "zephyr": form(
        "<|assistant|>\n", "</s>", "<|{{ m.role }}|>\n{{ m.content }}</s>\n", "<|assistant|>\n", "\n"
    ),
    "deepseek": form("<|Assistant|>", "</s>", "<|User|>{{ m.content }}", "<|Assistant|>"),
    "vicuna": form("ASSISTANT: ", "</s>", "{{ m.role | upper }}: {{ m.content }} ", "ASSISTANT: "),
    "alpaca": form(
        "### Response:\n", "<eos>", "### Instruction:\n{{ m.content }}\n\n", "### Response:\n", "\n\n"
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, one token each, and the end tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made = Tokenizer(models.BPE({one: number for number, one in enumerate(sorted(alphabet))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=made)
    found.add_special_tokens({"additional_special_tokens": list(WORDS)})
    return found


def reader(
    tokenizer: PreTrainedTokenizerFast, template: str, turns: Any = "all", **limits: int
) -> SupervisedReader:
    ends = tokenizer.convert_tokens_to_ids(list(WORDS))
    codec = TextCodec(tokenizer.backend_tokenizer, ends, len(tokenizer))
    return SupervisedReader(
        codec, ChatTemplate(codec, "model", {"default": template}, {}, {}), ends, turns, **limits
    )


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CONVERSATIONS = (
    [{"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "3"}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": "and 4 more? <|im_end|>"},
        {"role": "assistant", "content": "7\n"},
    ],
)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one turn", "tools and turns"])
def test_the_mask_is_the_templates_own(tokenizer: PreTrainedTokenizerFast, name: str, messages: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = reader(tokenizer, TEMPLATES[name]).row({"messages": messages, "tools": tools})
    plain = json.loads(json.dumps(messages).replace("<|im_end|>", "<?im_end?>"))  # as text it ends no turn
    wanted = tokenizer.apply_chat_template(
        plain, tools=tools, chat_template=TEMPLATES[name], return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = wanted["input_ids"], wanted["assistant_masks"]
    last = max(place for place, own in enumerate(mask) if own) + 1
    own = [0] * len(row.token_ids)
    for start, stop in row.learned:
        own[start:stop] = [1] * (stop - start)
    assert len(row.token_ids) == last and own == mask[:last]
    text = tokenizer.decode(list(row.token_ids)).replace("<|im_end|>", "<?im_end?>")
    assert text == tokenizer.decode(ids[:last]).replace("<|im_end|>", "<?im_end?>")
    (last_turn,) = (
        reader(tokenizer, TEMPLATES[name], "last").row({"messages": messages, "tools": tools}).learned
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
        ("chatml", {"messages": "1"}, "must be a list of objects"),
        ("chatml", {"prompt": "1" * 99, "completion": "2"}, "more than data.max_tokens=60; shorten it"),
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
