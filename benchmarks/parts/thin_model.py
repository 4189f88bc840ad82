"""Thin model: Qwen3's class, tokenizer and vocabulary of 151,936 tokens, with random weights that are thin.

It takes every path that a real Qwen3 takes, on two cores: 42.8 million parameters, 93% of them the embedding.
The tokenizer is Qwen's own byte-pair table, which the package dashscope holds (Apache-2.0); it is installed
in the user's cache on first use, and nothing of it is kept here. The chat template is a plain ChatML.

    scripts/thin-model FOLDER [--seed N] [--moe]
"""

import argparse
import base64
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from antiphon.benchmarks.parts.own_environment import MissingToolError, python_with
from antiphon.benchmarks.parts.warmstart.tiny_model import (
    MixtureShape,
    ModelShape,
    build_model,
    save_tiny_model,
)
from antiphon.core.digests import digest_file

SHAPE = ModelShape(
    hidden_size=256,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=64,
    mlp_size=768,
    vocabulary=151_936,
    context=8192,
    rope_theta=1e6,
)
MIXTURE = MixtureShape(**{**asdict(SHAPE), "layers": 2, "mlp_size": 256}, experts=8)
"""Its form with experts: 2 of 8 for each token, in two layers."""
FINAL_NORM = 14.67
"""Weights of the last norm, with which a next token has about 4 nats of entropy. A tied head cannot be scaled
alone, and logits as flat as those of small random weights hide the faults of a sampler."""
PACKAGE, TABLE = "dashscope==2.0.2", "dashscope/resources/qwen.tiktoken"
TABLE_DIGEST = "6d8cbc295dd0e4dd91c7e4c071e8417aa0d2c5f78d89a38853b10dd516ebbca9"
"""Of the table: 151,643 lines of a byte string in base 64 and its rank."""
END, TURN_END = "<|endoftext|>", "<|im_end|>"
SPECIALS = (
    *(END, "<|im_start|>", TURN_END, "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
WORDS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
"""Tokens behind the special ones that decoding does not leave out."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def read_table() -> dict[bytes, int]:
    """Return byte string -> rank of Qwen's tokens without the special ones.

    Raises:
        MissingToolError: when the package cannot be had, or holds another table.
    """
    folder = python_with([PACKAGE], beside_project=True).parents[1]
    path = next(folder.glob(f"lib/python*/site-packages/{TABLE}"), None)
    if path is None or digest_file(path) != TABLE_DIGEST:
        raise MissingToolError(f"{PACKAGE} has not the {TABLE} that this was written for")
    lines = (line.split() for line in path.read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def parts_below(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Return what byte-pair encoding makes of a token with the tokens of lower rank: the pair it merges."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        merged = [first + second for first, second in pairwise(parts)]
        place = min(range(len(merged)), key=lambda i: ranks.get(merged[i], len(ranks)))
        parts[place : place + 2] = [merged[place]]
    return parts


def build_tokenizer(ranks: Mapping[bytes, int]) -> Qwen2Tokenizer:
    """Build the tokenizer, with the chat template, of a table."""
    letters = bytes_to_unicode()

    def word(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [tuple(map(word, parts_below(token, ranks))) for token in sorted(ranks, key=ranks.__getitem__)]
    tokenizer = Qwen2Tokenizer(
        {word(token): rank for token, rank in ranks.items()},
        [pair for pair in merges if len(pair) == 2],
        model_max_length=SHAPE.context,
        clean_up_tokenization_spaces=False,
    )
    for words, special in ((SPECIALS, True), (WORDS, False)):
        tokens = [AddedToken(text, special=special, normalized=False) for text in words]
        tokenizer.add_tokens(tokens, special_tokens=special)
    tokenizer.eos_token, tokenizer.chat_template = TURN_END, TEMPLATE
    return tokenizer


def make_thin_model(folder: Path, seed: int = 0, shape: ModelShape = SHAPE) -> Path:
    """Write the model, a function of seed and shape, as a Hugging Face folder, and return the folder.

    Raises:
        MissingToolError: when the tokenizer's table cannot be had.
    """
    tokenizer = build_tokenizer(read_table())
    model = build_model(shape, seed)
    with torch.no_grad():
        model.model.norm.weight.fill_(FINAL_NORM)
    end, turn_end = tokenizer.convert_tokens_to_ids([END, TURN_END])
    model.config.bos_token_id = model.config.pad_token_id = end
    model.config.eos_token_id = [turn_end, end]
    save_tiny_model(model, tokenizer, folder)
    return folder


def main() -> None:
    """Write the model to a folder."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--moe", action="store_true", help="with experts (Qwen3MoE)")
    options = parser.parse_args()
    try:
        print(make_thin_model(options.folder, options.seed, MIXTURE if options.moe else SHAPE))
    except MissingToolError as error:
        raise SystemExit(f"no thin model: {error}") from error


if __name__ == "__main__":
    main()
