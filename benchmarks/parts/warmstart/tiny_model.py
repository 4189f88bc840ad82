"""Tiny model: the demo's policy before training, a small Qwen3 and a tokenizer that fits its task.

Both are ordinary Hugging Face artifacts: what `save_tiny_model` writes, `AutoModelForCausalLM`
and `AutoTokenizer` load, and vLLM serves. The sentence that opens every prompt is one token (it
says the same each time, and tokens are what a small machine pays for), and so is every other
word, digit and operator; blanks between numbers are dropped.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from antiphon.core.errors import ConfigError
from antiphon.models.experts import pieces_in_files

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
SYMBOLS = tuple("0123456789+-=;:*/().,?")

WEIGHTS = "model.safetensors"
"""Name of the file that holds the weights."""

_PIECES = r"</?(?:think|answer)>| ?[A-Za-z]+|\S"
"""A tag, a word with the blank before it, or any other visible character."""
_OPENING = re.compile(r"[A-Za-z][^0-9]*[^0-9\s(+-]")
"""The words that open every prompt of a task, up to its first number."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the Qwen3 architecture; the defaults make 0.45 million parameters."""

    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp_size: int = 256
    vocabulary: int = 64
    """Tokens, of which those the task does not use are reserved."""
    context: int = 1024
    """Longest prompt and completion together, in tokens."""
    rope_theta: float = 10_000.0


@dataclass(frozen=True, slots=True)
class MixtureShape(ModelShape):
    """Sizes with experts in each layer, every one as wide as `mlp_size`."""

    experts: int = 4
    experts_used: int = 2
    """By a token."""


def build_tokenizer(prompt: str, shape: ModelShape) -> PreTrainedTokenizerFast:
    """Build the tokenizer whose words are those of `prompt`.

    Decoding joins the tokens as they are: completions come back letter for letter, prompts
    without the blanks around numbers and operators.

    Args:
        prompt: any prompt of the environment; all of them use the same words.
        shape: gives the size of the vocabulary and the context.

    Raises:
        ConfigError: when the words do not fit the vocabulary.
    """
    found = _OPENING.match(prompt)
    opening = [found.group()] if found else []
    pieces = "|".join([*map(re.escape, opening), _PIECES])
    words = [piece for piece in re.findall(_PIECES, prompt) if piece.strip().isalpha()]
    tokens = list(dict.fromkeys([*SPECIAL_TOKENS, *TAGS, *SYMBOLS, *words, *opening]))
    if len(tokens) > shape.vocabulary:
        raise ConfigError(
            f"the prompt {prompt[:60]!r} needs {len(tokens)} tokens, but shape.vocabulary is "
            f"{shape.vocabulary}; raise it"
        )
    tokens += [f"<reserved-{place}>" for place in range(len(tokens), shape.vocabulary)]
    tokenizer = Tokenizer(
        models.WordLevel({token: place for place, token in enumerate(tokens)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.Split(Regex(r"^\s+$"), "removed"),
        ]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=shape.context,
    )


def build_model(shape: ModelShape, seed: int) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """Build the model with random float32 weights, a function of (shape, seed) alone."""
    kind, more = Qwen3Config, {}
    if isinstance(shape, MixtureShape):
        kind = Qwen3MoeConfig
        more = {"num_experts": shape.experts, "num_experts_per_tok": shape.experts_used}
        more |= {"moe_intermediate_size": shape.mlp_size, "norm_topk_prob": True}
    config = kind(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.mlp_size,
        max_position_embeddings=shape.context,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        eos_token_id=SPECIAL_TOKENS.index("<eos>"),
        bos_token_id=SPECIAL_TOKENS.index("<bos>"),
        use_cache=True,
        dtype="float32",
        attn_implementation="sdpa",
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (Qwen3MoeForCausalLM if more else Qwen3ForCausalLM)(config).float()


def save_tiny_model(
    model: Qwen3ForCausalLM | Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path
) -> Path:
    """Write a Hugging Face model directory and return the path of its weights.

    The file's bytes depend on the weights alone, so its digest names them. The output matrix is
    tied to the embedding and therefore not written twice.
    """
    out.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)
    GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    ).save_pretrained(out)
    tokenizer.save_pretrained(out)
    weights = out / WEIGHTS
    held = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    pieces = pieces_in_files({name: tensor.shape for name, tensor in held.items()})
    tensors = {
        name: piece.of(held[piece.tensor]).detach().contiguous().clone() for name, piece in pieces.items()
    }
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors lets only the owner read; another user may serve the model
    return weights
