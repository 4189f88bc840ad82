"""A model folder for turns without weights: its tokenizer, chat template and end tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from antiphon.benchmarks.parts.warmstart.chat_tokenizer import MARKERS, SPECIAL_TOKENS, TEMPLATE
from antiphon.core.config import RunConfig
from antiphon.models.rendering import Renderer

ENDS = ("<|im_end|>", "<|endoftext|>")
KEEP: dict[str, Any] = {"thinking_retention": "all"}


def write_turn_model(
    folder: Path,
    template: str | None = TEMPLATE,
    markers: Sequence[str] = (*SPECIAL_TOKENS[:3], *MARKERS),
    ends: Sequence[str] = ENDS,
) -> str:
    """Write a folder whose tokenizer has every byte and these markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: place for place, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([one for one in markers if one in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in markers if one in MARKERS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tree = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[0], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(tree))
    eos = [tokenizer.token_to_id(end) for end in ends]
    size = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "vocab_size": size, "eos_token_id": eos})
    )
    return str(folder)


def load_renderer(
    path: str,
    turns: bool = True,
    renderer: str = "qwen3",
    arguments: dict[str, Any] | None = None,
    **environment: Any,
) -> Renderer:
    """Load what renders for a run of a model, by default so that turns can follow."""
    given = KEEP if arguments is None and turns else arguments or {}
    model = {"path": path, "renderer": renderer, "template_arguments": given}
    return Renderer.load(RunConfig.model_validate({"model": model, "environment": environment}), turns)
