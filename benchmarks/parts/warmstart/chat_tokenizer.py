"""Chat tokenizer: what the tiny model of turns reads and writes, with the markers of ChatML.

Every ASCII character is a token, so any English text can be said, and so are the marker tokens, the words of
the example tasks, and what stands around tools and calls: it says the same each time, and tokens are what a
small machine pays for. The chat template writes as Qwen3's does without thinking.
"""

import re
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<unk>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CHARACTERS = tuple(map(chr, (10, *range(32, 127))))

TOOLS_BEGIN = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_END = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
    "<tool_call></tool_call>",
    " XML tags:\n",
    "<tool_call>",
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
    "</tool_call>",
)
_WORDS = (
    *(TOOLS_BEGIN, *TOOLS_END[::2]),
    *("system", "user", "assistant"),
    *('{"type": "function", "function": {"name": "', '", "description": "', '"required": ['),
    *('", "parameters": {"type": "object", "properties": {', '": {"type": "integer"}'),
    *('{"name": "', '", "arguments": {"', '": ', ', "', "}}"),
    *("Guess my number from ", " to ", "higher", "lower", "What is ", " + ", "add", "Adds two numbers."),
)

TEMPLATE = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- " + repr(TOOLS_BEGIN) + " }}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- " + repr("".join(TOOLS_END)) + " }}{{- '<|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{%- endif %}"
)


def build_chat_tokenizer(context: int = 1024, more_words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Build the tokenizer, with the chat template; `context` is its longest text, in tokens."""
    words = sorted((*_WORDS, *more_words), key=len, reverse=True)
    tokens = (*SPECIAL_TOKENS, *MARKERS, *CHARACTERS, *words)
    tokenizer = Tokenizer(
        models.WordLevel({token: place for place, token in enumerate(tokens)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join([*map(re.escape, words), r"[\s\S]"])), "isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        unk_token=SPECIAL_TOKENS[3],
        clean_up_tokenization_spaces=False,
        model_max_length=context,
        chat_template=TEMPLATE,
    )
