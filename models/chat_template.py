"""Chat template: a model's own form of a conversation, written by jinja2 as transformers writes it.

Neither transformers nor torch is imported for a folder: coordinator and reward service need words and their
tokens alone. A task's text comes shielded (`codec.TextCodec.shielded`), so that the special tokens in what is
written are the template's own.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.models.codec import TextCodec, load_pretrained
from antiphon.models.directory import tokenizer_settings
from antiphon.system.clock import wall_clock

_NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""What templates may call special tokens by."""


class ChatTemplate:
    """A model's own chat template; it begins a conversation and cannot go on with one."""

    def __init__(
        self,
        codec: TextCodec,
        path: str,
        texts: Mapping[str, str],
        specials: Mapping[str, str],
        arguments: Mapping[str, Any],
    ) -> None:
        """Take what `chat_templates` found, and `model.template_arguments`.

        Raises:
            ConfigError: when no template is called default, or none asks for an argument.
        """
        self._codec, self._path, self._texts = codec, path, texts
        self._arguments = {**specials, **arguments}
        if "default" not in texts:
            raise ConfigError(
                f"model.path={path} has the chat templates {', '.join(texts)} and none called default; "
                "call one so, or set model.renderer to that of the model's family"
            )
        for name in arguments:
            if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts.values()):
                raise ConfigError(
                    f"model.template_arguments.{name}: the chat template of model.path={path} does not ask "
                    "for it; correct the name, or name the renderer that takes it in model.renderer"
                )

    def render_ids(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the token ids of a conversation.

        Raises:
            ConfigError: when the template is broken, or refuses what it is given.
        """
        from jinja2 import TemplateError

        name = "tool_use" if tools and "tool_use" in self._texts else "default"
        given = {"messages": messages, "tools": tools, "documents": None, **self._arguments}
        try:
            words = _compiled(self._texts[name]).render(add_generation_prompt=add_generation_prompt, **given)
        except (TemplateError, ValueError, TypeError) as error:
            number = getattr(error, "lineno", None)
            line = "" if number is None else f"line {number}: "
            turns = ", ".join(message["role"] for message in messages)
            turns = "one user turn without a system turn" if turns == "user" else f"the turns {turns}"
            raise ConfigError(
                f"model.path={self._path!r}: its chat template fails on {turns} "
                f"({line}{' '.join(str(error).split())[:200]}); fix it, or set chat_template to null in "
                "tokenizer_config.json to have prompts encoded plainly"
            ) from error
        # The template writes its own special tokens; adding them again would double the first.
        return list(self._codec.encode(words, add_special_tokens=False))


def chat_templates(path: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return a model's chat templates by name, and its special tokens by name, as transformers finds them.

    Args:
        path: folder or hub name, as `resolve_model_path` returns it.

    Raises:
        ConfigError: when a template cannot be read, or no hub gives the model.
    """
    folder = Path(path)
    if not folder.is_dir():
        pretrained = load_pretrained(path)
        named, specials = pretrained.chat_template, pretrained.special_tokens_map
    else:
        tree = tokenizer_settings(folder)
        named = tree.get("chat_template")  # null is what exporters write where there is none
        try:
            if isinstance(named, list):
                named = {one["name"]: one["template"] for one in named}
            tokens = {name: tree.get(name) for name in _NAMED_TOKENS}
            words = {name: one["content"] if isinstance(one, dict) else one for name, one in tokens.items()}
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"model.path={path!r}: tokenizer_config.json has a chat template or token without {error}; "
                "copy the file again"
            ) from error
        files = {file.stem: file for file in folder.glob("additional_chat_templates/*.jinja")}
        if (file := folder / "chat_template.jinja").is_file():
            files["default"] = file
        try:
            named = {name: file.read_text(encoding="utf-8") for name, file in files.items()} or named
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.path={path!r}: a chat template cannot be read ({error})") from error
        specials = {name: word for name, word in words.items() if isinstance(word, str)}
    return ({"default": named} if isinstance(named, str) else dict(named or {})), dict(specials)


@cache
def _compiled(text: str) -> Any:
    """Compile a template with what transformers lets one use (its utils/chat_template_utils.py)."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Marks what the policy writes, for those who train on whole conversations."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
            )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.fromtimestamp(wall_clock()).strftime(form)
    return environment.from_string(text)
