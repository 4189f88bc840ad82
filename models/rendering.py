"""Rendering: messages to token ids, and what a policy sampled to its reply, in this one place.

Nothing that was sampled is ever rendered again: what follows a turn are the old token ids and new ones behind
them. The `renderers` package knows how model families write turns, thinking and tools; it is imported when a
configuration names one of its renderers, or for a task with turns. A prompt of one turn is otherwise what
the model's own chat template makes of it, or its plain tokens where the model has none.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError, ContractError, IntegrityError
from antiphon.core.messages import Message, Reply, Tool, ToolCall
from antiphon.models.chat_template import ChatTemplate, chat_templates
from antiphon.models.codec import StopStrings, TextCodec, resolve_model_path
from antiphon.models.directory import read_json

OWN_TEMPLATE = "default"
"""What `model.renderer` calls the model's own chat template."""
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>")
"""End tokens that only models of conversations have."""
NO_RENDERERS, DOWNLOADS = ("auto", "custom", OWN_TEMPLATE), "gpt-oss"
"""Names of the package that are not its renderers, and a renderer that is never tried: it fetches a file."""

FAULTS = (AssertionError, LookupError, RuntimeError, TypeError, ValueError)
"""What the package raises for what it does not take, and its parsers for some tokens: JSON may have numbers
that are too long and brackets that are too deep."""

_CALL = ToolCall("add", {"a": 1, "b": 2})
_TOOL = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
_QUESTION = Message("user", "1 + 2")
_CONVERSATIONS: tuple[tuple[tuple[Message, ...], tuple[Tool, ...]], ...] = (
    ((_QUESTION,), ()),
    ((Message("system", "3"), _QUESTION), ()),
    ((_QUESTION, Message("assistant", "3"), _QUESTION), ()),
    ((_QUESTION,), (_TOOL,)),
    ((_QUESTION, Message("assistant", "", (_CALL,)), Message("tool", "3", name="add")), (_TOOL,)),
)
"""A renderer that writes these as the model's chat template does is taken for the model's."""


class Renderer:
    """Makes token ids of messages and replies of token ids, for one model and its settings.

    T tokens of a row, of which a turn's are the last ones that the policy sampled.
    """

    def __init__(
        self,
        codec: TextCodec,
        written: Any = None,
        name: str = OWN_TEMPLATE,
        system_prompt: str | None = None,
        max_lost_share: float = 0.0,
    ) -> None:
        """Wrap what was checked; `load` is the usual way in.

        `written` is a renderer of the package or `ChatTemplate`; None: prompts are encoded plainly.
        `max_lost_share` is `environment.max_lost_share`, for each message of a conversation.
        """
        self.codec = codec
        self.name = name
        """The renderer's, as `model.renderer` spells it."""
        self.stops: StopStrings | None = None
        """What ends a turn besides its end token."""
        self._written = written
        self._system_prompt = system_prompt
        self._max_lost_share = max_lost_share

    @classmethod
    def load(cls, config: RunConfig, turns: bool = False) -> "Renderer":
        """Load what renders for a run; with `turns` it is tried whether a conversation can go on.

        Raises:
            ConfigError: naming the key, when the model, its tokenizer and the settings do not fit each other.
        """
        arguments, environment = config.model.template_arguments, config.environment
        path = resolve_model_path(config.model.path)
        codec = TextCodec.load(path)
        name, written = _chosen(config.model.renderer, codec, path, arguments, turns)
        found = cls(codec, written, name, environment.system_prompt, environment.max_lost_share)
        found.stops = StopStrings(codec, config.sampling.stop) if config.sampling.stop else None
        if turns:
            found._check_turns(path, arguments)
        elif written is None and (environment.system_prompt or arguments):
            key = "environment.system_prompt" if environment.system_prompt else "model.template_arguments"
            raise ConfigError(f"{key} needs a chat template, and model.path={path} has none; remove it")
        if lost := found._lost(environment.system_prompt or ""):
            raise ConfigError(f"environment.system_prompt: {lost}")
        return found

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn in the model's form."""
        return tuple(self._written.get_stop_token_ids())

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Turn the text of a prompt into token ids: one user turn where there is a form for it, else plain.

        Raises:
            ConfigError: when the tokenizer makes no token of it, or the chat template fails.
        """
        shielded = self.codec.shielded(text)
        if self._written is None:
            ids = self.codec.encode(shielded)
        else:
            ids = self._begin([Message("user", shielded)])
        if not ids:
            raise ConfigError(
                f"the tokenizer of model.path makes no token of the prompt {text[:60]!r}; "
                "the environment and the model do not fit each other"
            )
        return ids

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Return the token ids of a conversation's beginning, up to where the policy's first turn begins.

        Raises:
            ContractError: when there is no message, or the tokenizer loses characters of one.
        """
        if not messages:
            raise ContractError("a conversation begins with at least one message, and there is none")
        given = [Tool(**self._shielded(asdict(tool))) for tool in tools]
        return self._begin(self._checked(messages, tools), given)

    def following(
        self,
        context: Sequence[int],
        turn: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> tuple[int, ...]:
        """Return the token ids to append so that the policy's next turn can be sampled.

        Args:
            context: everything before the policy's last turn, [T - turn].
            turn: what it sampled then, [turn]; it is closed in the model's form where it was cut.
            messages: what the environment says to it.
            tools: those of the opening.

        Raises:
            ContractError: when nothing can follow, or the tokenizer loses characters of a message.
            IntegrityError: when the package would change old tokens.
        """
        old = [*context, *turn]
        try:
            whole = self._continued(context, turn, self._checked(messages), tools)
        except FAULTS as error:
            raise ContractError(f"the renderer {self.name} fails on {_roles(messages)}: {error}") from error
        if whole is None:
            raise ContractError(
                f"the renderer {self.name} cannot go on with {_roles(messages)}; an environment answers with "
                "messages of the roles user, tool or system"
            )
        if whole[: len(old)] != old:
            raise IntegrityError(
                f"the renderer {self.name} changed tokens of a conversation of {len(old)} tokens instead of "
                "adding to it; set another model.renderer"
            )
        return tuple(whole[len(old) :])

    def reply(self, context: Sequence[int], turn: Sequence[int], tools: Sequence[Tool] = ()) -> Reply:
        """Read what the policy sampled in one turn, [turn], after `context`, [T - turn].

        What looks like a tool call and is none is said in `malformed`; it is no error.
        """
        ids = list(turn)
        ended = bool(ids) and ids[-1] in self.codec.end_tokens
        cut = not ended and (self.stops is None or self.stops.end(ids) is None)
        if ended:
            ids.pop()
        try:
            parsed = self._written.parse_response(ids, tools=_tools(tools), prompt_ids=list(context))
        except FAULTS as error:
            words = f"a tool call cannot be read ({str(error)[:100]})"
            return Reply(self.codec.decode(ids).strip(), malformed=words, cut=cut)
        calls, wrong = [], []
        for call in parsed.tool_calls:
            if fault := _fault(call):
                wrong.append(f"the tool call {call.raw[:200]!r} {fault}")
            else:
                calls.append(ToolCall(call.name, call.arguments, call.id or ""))
        text, thinking = (
            self.codec.specials.sub("", part or "") for part in (parsed.content, parsed.reasoning_content)
        )
        return Reply(text, thinking, tuple(calls), "; ".join(wrong), cut)

    def _begin(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        if self._system_prompt:
            own = [message.content for message in messages[:1] if message.role == "system"]
            messages = [Message("system", "\n\n".join([self._system_prompt, *own])), *messages[len(own) :]]
        return tuple(_rendered(self._written, messages, tools))

    def _continued(
        self, context: Sequence[int], turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return the whole row with what follows; None where the package would render it all again."""
        new, given = _plain(messages), _tools(tools)
        found = self._written.bridge_to_next_turn(list(context), list(turn), new, tools=given)
        if found is None and turn and turn[-1] in self.stop_token_ids:
            # It ended inside its thinking, which the package would have to close. We keep what was sampled:
            # what follows an end token does not depend on what stood before it.
            row = [*context, *turn]
            found = self._written.bridge_to_next_turn(row, row[-1:], new, tools=given)
            if found is not None:
                del found.token_ids[len(row)]
        return None if found is None else list(found.token_ids)

    def _check_turns(self, path: str, arguments: Mapping[str, Any]) -> None:
        """Try whether a conversation goes on, and compare the tokens that end a turn with the model's.

        Raises:
            ConfigError: with the setting that mends it.
        """
        if self._written is None or isinstance(self._written, ChatTemplate):
            has = "no chat template" if self._written is None else "a chat template, which renders all again"
            raise ConfigError(
                f"model.renderer={OWN_TEMPLATE}: model.path={path} has {has}, and a task with turns needs a "
                f"renderer that adds to a conversation; {_advice(self.codec, path)}"
            )
        if not self._goes_on():
            kept = {**arguments, "thinking_retention": "all"}
            try:
                mended = Renderer(self.codec, _build(self.name, self.codec, path, kept), self.name)._goes_on()
            except ConfigError:  # it has no such setting, or it contradicts another one
                mended = False
            retain = "set model.template_arguments.thinking_retention to all"
            raise ConfigError(
                f"the renderer {self.name} with model.template_arguments={json.dumps(dict(arguments))} "
                "renders a conversation again when a user answers, and other tokens than the sampled ones "
                f"would be trained on; {retain if mended else _advice(self.codec, path)}"
            )
        for token in self.stop_token_ids:
            if token not in self.codec.end_tokens:
                word = self.codec.tokenizer.id_to_token(token)
                raise ConfigError(
                    f"the renderer {self.name} ends a turn with {word!r} ({token}), which is no end token of "
                    f"model.path={path}; add {token} to eos_token_id in its generation_config.json"
                )

    def _goes_on(self) -> bool:
        context = self._begin([_QUESTION])
        turns = [self.codec.encode("3 4"), (*self.codec.encode("3 4"), self.stop_token_ids[0])]
        return all(self._continued(context, turn, [_QUESTION], ()) is not None for turn in turns)

    def _checked(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[Message]:
        """Return messages in which special tokens that are spelt out are text: none begins or ends a turn.

        Raises:
            ContractError: naming the first character that the tokenizer loses.
        """
        texts = [(f"a message of role {message.role}", message.content) for message in messages]
        texts += [(f"the tool {tool.name}", f"{tool.name} {tool.description}") for tool in tools]
        for place, text in texts:
            if lost := self._lost(text):
                raise ContractError(f"{place}: {lost}")
        return [
            replace(
                message,
                content=self.codec.shielded(message.content),
                name=self.codec.shielded(message.name),
                tool_calls=tuple(ToolCall(**self._shielded(asdict(call))) for call in message.tool_calls),
            )
            for message in messages
        ]

    def _shielded(self, tree: Any) -> Any:
        """Return what a JSON value is with all its texts shielded, the names of its fields too."""
        if isinstance(tree, Mapping):
            return {self._shielded(key): self._shielded(value) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return [self._shielded(value) for value in tree]
        return self.codec.shielded(tree) if isinstance(tree, str) else tree

    def _lost(self, text: str) -> str:
        """Say which character the tokenizer loses first, when it loses more than is allowed; else nothing."""
        lost = self.codec.lost_characters(text)
        if len(lost) <= self._max_lost_share * sum(not character.isspace() for character in text):
            return ""
        return (
            f"the tokenizer of model.path has no token for {text[lost[0]]!r}, at place {lost[0]} of "
            f"{text[:80]!r}; take another model, or raise environment.max_lost_share to do without"
        )


class _Vocabulary:
    """What renderers ask of a tokenizer; it notes the tokens that they asked for and that it lacks."""

    def __init__(self, codec: TextCodec, path: str, pretends: bool = False) -> None:
        """`pretends`: tokens that it lacks have an id too, so that a renderer asks for all of them."""
        self._codec, self._pretends = codec, pretends
        self.name_or_path = path
        self.eos_token_id, self.unk_token_id = codec.end_token_id, codec.unknown_id
        self.missing: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self._codec.encode(text, add_special_tokens))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._codec.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        found = self._codec.tokenizer.token_to_id(token)
        if found is None:
            self.missing.append(token)
        return -1 if found is None and self._pretends else found


def _kinds() -> dict[str, Any]:
    """Return the configurations of the package's renderers by name."""
    from renderers.configs import RendererConfig

    kinds = {kind.model_fields["name"].default: kind for kind in get_args(get_args(RendererConfig)[0])}
    return {name: kind for name, kind in kinds.items() if name not in NO_RENDERERS}


def _build(name: str, codec: TextCodec, path: str, arguments: Mapping[str, Any]) -> Any:
    """Build a renderer of the package.

    Raises:
        ConfigError: when there is none of that name, it does not take the arguments, or the tokenizer lacks
            tokens that it writes.
    """
    from pydantic import ValidationError
    from renderers import create_renderer

    kinds = _kinds()
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, 1)
        raise ConfigError(
            f"model.renderer={name!r} is no renderer{f', did you mean {near[0]}?' if near else ''}; "
            f"there are auto, {OWN_TEMPLATE}, {', '.join(kinds)}"
        )
    try:
        config = kinds[name].model_validate(dict(arguments))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(["model.template_arguments", *map(str, fault["loc"])])
        taken = ", ".join(sorted(set(kinds[name].model_fields) - {"name"}))
        raise ConfigError(f"{key}: {fault['msg']}; the renderer {name} takes {taken}") from error
    faults = ""
    for pretends in (False, True):
        vocabulary = _Vocabulary(codec, path, pretends)
        try:
            built = create_renderer(vocabulary, config)
        except FAULTS as error:
            faults = faults or " ".join(str(error).split())[:200]
            continue
        if not pretends:
            return built
    raise ConfigError(
        f"the renderer {name} needs tokens that the tokenizer of model.path={path} lacks: "
        f"{', '.join(dict.fromkeys(vocabulary.missing)) or faults}; add them, or set model.renderer to that "
        "of the model's family"
    )


def _fitting(codec: TextCodec, path: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the renderers of the package that a tokenizer has the tokens for, by name."""
    found = {}
    for name in _kinds():
        if name == DOWNLOADS:
            continue
        try:
            found[name] = _build(name, codec, path, arguments)
        except ConfigError:  # not of this family
            continue
    return found


def _advice(codec: TextCodec, path: str) -> str:
    names = ", ".join(_fitting(codec, path, {}))
    if not names:
        return f"no renderer fits the tokenizer of model.path={path}: take a model of a family that has one"
    return f"set model.renderer to that of the model's family; its tokenizer has the tokens of {names}"


def _chosen(
    wanted: str, codec: TextCodec, path: str, arguments: Mapping[str, Any], turns: bool
) -> tuple[str, Any]:
    """Return the name of what `model.renderer` means and the thing itself; None where prompts are plain.

    Raises:
        ConfigError: when there is none, or it does not fit the tokenizer or the arguments.
    """
    if wanted not in ("auto", OWN_TEMPLATE):
        return wanted, _build(wanted, codec, path, arguments)
    texts, specials = chat_templates(path)
    if not texts:
        _check_plain(codec, path)
        return OWN_TEMPLATE, None
    if wanted == OWN_TEMPLATE or not turns:
        return OWN_TEMPLATE, ChatTemplate(codec, path, texts, specials, arguments)
    # Some renderers keep in history what the template drops, but not by default; of other models the default
    # is another one than their family's.
    for given in ({}, arguments):
        for name, written in _fitting(codec, path, given).items():
            asked = written.config.template_field_names()
            own = {key: given[key] for key in given if key in asked}
            template = ChatTemplate(codec, path, texts, specials, own)
            if all(_alike(written, template, *each) for each in _CONVERSATIONS):
                return name, _build(name, codec, path, arguments)
    raise ConfigError(
        f"no renderer writes conversations as the chat template of model.path={path} does; "
        f"{_advice(codec, path)}"
    )


def _check_plain(codec: TextCodec, path: str) -> None:
    """Check that prompts without any form are what a model's files ask for.

    Raises:
        ConfigError: when the model ends turns, and no template says how they begin.
    """
    found = [name for name in TURN_ENDS if codec.tokenizer.token_to_id(name) in codec.end_tokens]
    if found and "chat_template" not in read_json(Path(path) / "tokenizer_config.json"):
        raise ConfigError(
            f"model.path={path} ends turns with {found[0]} but has no chat template; copy its publisher's "
            "chat_template.jinja there, set model.renderer to that of the model's family, or set "
            "chat_template to null in tokenizer_config.json to have prompts encoded plainly"
        )


def _alike(written: Any, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    try:
        expected = _rendered(template, messages, tools)
    except ConfigError:  # the template refuses such conversations
        return len(messages) > 1 or bool(tools)
    try:
        return _rendered(written, messages, tools) == expected
    except ConfigError:
        return False


def _rendered(written: Any, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
    try:
        return list(written.render_ids(_plain(messages), tools=_tools(tools), add_generation_prompt=True))
    except FAULTS as error:
        raise ConfigError(
            f"{type(written).__name__} of model.renderer cannot begin with {_roles(messages)} ({error}); "
            "change what the environment begins with, or the renderer"
        ) from error


def _roles(messages: Sequence[Message]) -> str:
    return f"these messages (roles: {', '.join(message.role for message in messages) or 'none'})"


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form of chat completions, as templates and the package read them."""
    found = []
    for message in messages:
        called = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
        ids = [call.call_id for call in message.tool_calls]
        calls = [{"type": "function", "id": i, "function": call} for i, call in zip(ids, called, strict=True)]
        given = {"tool_calls": calls, "tool_call_id": message.tool_call_id, "name": message.name}
        given = {key: value for key, value in given.items() if value}
        found.append({"role": message.role, "content": message.content, **given})
    return found


def _tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    return [{"type": "function", "function": asdict(tool)} for tool in tools] or None


def _fault(call: Any) -> str:
    """Return why an attempt at a tool call is none; nothing where it is one."""
    if call.status != "ok":
        return f"is no call ({str(call.status).replace('_', ' ')})"
    if not isinstance(call.name, str) or not call.name:
        return "names no tool"
    if not isinstance(call.arguments, dict):
        return "has arguments that are no JSON object"
    try:
        json.dumps(call.arguments, allow_nan=False)
    except (ValueError, RecursionError):
        return "has arguments that are not in JSON, such as NaN"
    return ""
