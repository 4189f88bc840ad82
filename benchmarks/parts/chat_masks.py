"""Chat masks: ten chat templates in the form of well-known ones, and which of their tokens are learned.

Every template marks what the assistant wrote itself (`{% generation %}`), so that Transformers gives a mask
without Antiphon (`return_assistant_tokens_mask`), which `masks` puts beside that of `models.supervised`.
"""

import json
from typing import Any

from transformers import PreTrainedTokenizerFast

from antiphon.models.chat_template import ChatTemplate
from antiphon.models.codec import TextCodec
from antiphon.models.supervised import SupervisedReader

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
    """Return a template: what begins and ends an assistant's turn, other turns, the prompt for one."""
    text = before + LOOP + "{% if add_generation_prompt %}PROMPT{% endif %}"
    for name, value in (("HEAD", head), ("END", end), ("OTHER", other), ("PROMPT", prompt), ("TAIL", tail)):
        text = text.replace(name, value)
    return text


def chatml(before: str = "") -> str:
    """Return ChatML, behind `before`."""
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


def make_tokenizer() -> PreTrainedTokenizerFast:
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
    """Return what reads rows by a template."""
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


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
Masked = tuple[list[int], list[int]]
"""Token ids, and 1 for each that is learned, else 0."""


def masks(tokenizer: PreTrainedTokenizerFast, name: str, messages: Any) -> tuple[Masked, Masked]:
    """Return the mask of a conversation, and the template's own, up to the last token that is learned.

    The tokens of the text `<|im_end|>` within a message are other ones in the two: as text it ends no turn.
    """
    row = reader(tokenizer, TEMPLATES[name]).row({"messages": messages, "tools": TOOLS})
    own = [0] * len(row.token_ids)
    for start, stop in row.learned:
        own[start:stop] = [1] * (stop - start)
    plain = json.loads(json.dumps(messages).replace("<|im_end|>", "<?im_end?>"))
    wanted = tokenizer.apply_chat_template(
        plain, tools=TOOLS, chat_template=TEMPLATES[name], return_dict=True, return_assistant_tokens_mask=True
    )
    last = max(place for place, learned in enumerate(wanted["assistant_masks"]) if learned) + 1
    return (list(row.token_ids), own), (wanted["input_ids"][:last], wanted["assistant_masks"][:last])


def masks_equal_share() -> float:
    """Return the share of the ten templates whose masks of all conversations are the templates' own."""
    tokenizer = make_tokenizer()
    pairs = {name: [masks(tokenizer, name, one) for one in CONVERSATIONS] for name in TEMPLATES}
    equal = [all(ours[1] == theirs[1] for ours, theirs in own) for own in pairs.values()]
    return sum(equal) / len(equal)
