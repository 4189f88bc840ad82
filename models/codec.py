"""Text codec: text to token ids and token ids to text, the same for everyone in a run.

Prompts are encoded (`rendering` frames them) and completions decoded with one and the same
tokenizer, the model's own. It is checked against the model when it is loaded, so that a pair
that does not match is refused before a token is sampled. Only the light `tokenizers` library is
imported; `transformers` comes in for hub names.

A tokenizer takes a special token that is spelt out in a text for the token itself: a task's text could end a
turn. `shielded` marks such places; they are encoded as the text that they are.
"""

import json
import re
import urllib.error
import urllib.request
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from antiphon.core.errors import ConfigError
from antiphon.core.records import IntArray
from antiphon.models.directory import end_tokens, read_json
from antiphon.system.memory import give_back

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""owner/name, as a model hub spells it."""
SHIELD = "\ufdd0"
"""Stands behind the first letter of a special token that is only text; Unicode lets no text have it."""
HUB_ANSWER_S = 5.0
"""Longest wait for the first answer of a model hub."""


def resolve_model_path(path: str) -> str:
    """Find the model that `model.path` means.

    A folder that exists is taken as given, then one relative to the project's root; a name of
    the form owner/name that is no folder is left for the hub.

    Raises:
        ConfigError: when it is neither a folder nor a possible hub name.
    """
    given = Path(path).expanduser()
    if path and given.is_dir():
        return str(given)
    root = Path(__file__).resolve().parents[1]
    # Of an installed package only examples/ is meant: its other folders hold code.
    meant = bool(path) if (root / "pyproject.toml").is_file() else given.parts[:1] == ("examples",)
    if meant and (root / given).is_dir():
        return str(root / given)
    if HUB_NAME.fullmatch(path):
        return path
    raise ConfigError(
        f"model.path={path!r} is no folder, here or under {root}, and no hub name of the form owner/name; "
        "give the directory of a Hugging Face model"
    )


def model_folder(path: str) -> Path | None:
    """Return the folder on this machine that `model.path` or `learner.lora.start` means; None without one."""
    try:
        found = Path(resolve_model_path(path))
    except ConfigError:
        return None
    return found if found.is_dir() else None


def local_model_directory(path: str) -> Path:
    """Return the folder of the model that `model.path` means, fetched from the hub if need be.

    Raises:
        ConfigError: when there is no such folder and no hub gives it.
    """
    resolved = resolve_model_path(path)
    if Path(resolved).is_dir():
        return Path(resolved)
    offline = _without_hub(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    wanted = ["*.json", "*.safetensors", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(resolved, allow_patterns=wanted, local_files_only=offline))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"model.path={path!r} is no folder here and no hub gave it ({reason}); "
            "download the model and give its directory"
        ) from error


class TextCodec:
    """The tokenizer of one model."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Sequence[int], vocabulary_size: int) -> None:
        """Wrap a tokenizer that was checked; `load` is the usual way in."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.end_token_id = end_tokens[0]
        """With this token the model's turn ends."""
        self.end_tokens = frozenset(end_tokens)
        """With each of these an engine ends what it samples."""
        unknown = getattr(tokenizer.model, "unk_token", None)
        self.unknown_id: int | None = None if unknown is None else tokenizer.token_to_id(unknown)
        """Stands for what the tokenizer does not know; None: it leaves that out."""
        self.vocabulary_size = vocabulary_size
        """Rows of the model's embedding; every token id is smaller."""
        added = tokenizer.get_added_tokens_decoder().values()
        words = sorted((one.content for one in added if one.special), key=len, reverse=True)
        self.specials = re.compile(f"({'|'.join(map(re.escape, words)) or '(?!)'})(?!{SHIELD})")
        """Finds special tokens in a text, those that are shielded apart."""
        self._has = cache(lambda character: bool(self.encode(character, add_special_tokens=False)))

    @classmethod
    def load(cls, model_path: str) -> "TextCodec":
        """Load the tokenizer of a model directory (or hub name) and check it against the model.

        Raises:
            ConfigError: naming model.path, when the directory or its tokenizer is missing or
                unreadable, or the tokenizer does not match the model.
        """
        folder = Path(model_path)
        if not folder.is_dir():
            return _load_from_hub(model_path)
        config = read_json(folder / "config.json", required=True)
        tokenizer = _read_tokenizer(folder / "tokenizer.json", model_path)
        codec = _checked(model_path, tokenizer, config, end_tokens(folder))
        give_back()  # 130 MB of Qwen3's, whose file is large
        return codec

    def shielded(self, text: str) -> str:
        """Return text in which special tokens that are spelt out are text."""
        # Behind every letter: one special token may be a part of another.
        return self.specials.sub(lambda found: SHIELD.join([*found[0], ""]), text.replace(SHIELD, ""))

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Turn text into token ids, with the special tokens that the tokenizer adds to a text if asked to."""
        if SHIELD not in text:
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        parts = self.specials.split(text)  # every second one is a special token
        words = [SHIELD + part if place % 2 else part.replace(SHIELD, "") for place, part in enumerate(parts)]
        return tuple(self._renamed.encode("".join(words), add_special_tokens=add_special_tokens).ids)

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The same tokenizer with a shield in front of each special token's name; most runs need none.

        To it the names without are text, and the whole of a text is still read at once.
        """
        tree = json.loads(self.tokenizer.to_str())
        model, added = tree["model"], [token for token in tree["added_tokens"] if token["special"]]
        names = {token["content"]: SHIELD + token["content"] for token in added}
        for token in added:
            token["content"] = names[token["content"]]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(word, word): number for word, number in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(word, word), score] for word, score in model["vocab"]]
        if model.get("unk_token"):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        renamed = Tokenizer.from_str(json.dumps(tree))
        del tree, model, added
        give_back()
        return renamed

    def lost_characters(self, text: str) -> list[int]:
        """Return where in a text the tokenizer loses characters: no token, or the unknown one, has them.

        Spaces do not count; many tokenizers leave them out on purpose.
        """
        if self.unknown_id is None:
            # What such a tokenizer does not know it drops, and the places of its tokens are wrong then.
            lost = {letter for letter in set(text) if not (letter.isspace() or self._has(letter))}
            return [i for i, letter in enumerate(text) if letter in lost] if lost else []
        tokenizer = self._renamed if self.specials.search(text) else self.tokenizer
        encoding = tokenizer.encode(text, add_special_tokens=False)
        seen = [False] * len(text)
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id != self.unknown_id:
                seen[start:stop] = [True] * (stop - start)
        return [i for i, character in enumerate(text) if not (seen[i] or character.isspace())]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Turn a completion's ids into text; special tokens and unknown ids are left out."""
        numbers = token_ids.tolist() if isinstance(token_ids, np.ndarray) else map(int, token_ids)
        size, ends = self.vocabulary_size, self.end_tokens
        ids = [i for i in numbers if 0 <= i < size and i not in ends]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def texts(self, many: Sequence[IntArray]) -> list[str]:
        """Turn many completions into text at once; special tokens are left out."""
        return list(self.tokenizer.decode_batch([ids.tolist() for ids in many], skip_special_tokens=True))

    def pieces(self, token_ids: Iterable[int]) -> list[str]:
        """Return the text of each token, special ones included; joined they are the text of all.

        A token that ends within a character has none, and the one that completes it has the character.
        """
        ids, found, before, begin = [*map(int, token_ids)], list[str](), 0, 0
        text = partial(self.tokenizer.decode, skip_special_tokens=False)
        for stop in range(1, len(ids) + 1):
            # In the context of the piece before: a decoder may treat the first token of a text otherwise.
            piece = text(ids[before:stop])[len(text(ids[before:begin])) :]
            whole = not piece.endswith("\N{REPLACEMENT CHARACTER}") or stop - begin > 3 or stop == len(ids)
            found.append(piece if whole else "")
            before, begin = (begin, stop) if whole else (before, begin)
        return found


class StopStrings:
    """Where a turn ends by `sampling.stop`: its last token is the one with which a string is complete.

    What is looked at is the text of the turn's tokens, special tokens included.
    """

    def __init__(self, codec: TextCodec, strings: Sequence[str]) -> None:
        self._decode, self._strings = codec.tokenizer.decode, strings
        # Each token has a byte at least; a few more in front, since a decoder may change the first ones.
        self._reach = max(len(one.encode()) for one in strings) + 8

    def end(self, tokens: Sequence[int], known: int = 0) -> int | None:
        """Return how many of a turn's tokens there are when a string is complete; None while none is.

        The first `known` tokens complete none.
        """
        begin = max(0, known - self._reach)

        def complete(stop: int) -> bool:
            text = self._decode(tokens[begin:stop], skip_special_tokens=False)
            return any(one in text for one in self._strings)

        if known >= len(tokens) or not complete(len(tokens)):
            return None
        if known + 1 == len(tokens) or not complete(len(tokens) - 1):
            return len(tokens)
        places = range(known + 1, len(tokens))
        return places[bisect_left(places, True, key=complete)]


def _read_tokenizer(path: Path, model_path: str) -> Tokenizer:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.path={model_path!r} has no readable {path.name} ({error}); "
            "save the model's fast tokenizer there"
        ) from error
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises the bare class for any malformed file
        raise ConfigError(
            f"model.path={model_path!r}: {path.name} is no tokenizer ({error}); "
            "save the model's fast tokenizer there"
        ) from error


def load_pretrained(model_path: str, offline: bool | None = None) -> Any:
    """Load the tokenizer of a model directory or hub name in its full form, with the chat template.

    `offline`: whether no hub is asked; None: that is found out.

    Raises:
        ConfigError: when it cannot be loaded.
    """
    if offline is None:
        offline = Path(model_path).is_dir() or _without_hub(model_path)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=offline)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model.path={model_path!r}: its tokenizer cannot be loaded ({first_line}); "
            "give the directory of a Hugging Face model, or a hub name where a hub is reachable"
        ) from error


def _load_from_hub(model_path: str) -> TextCodec:
    if not HUB_NAME.fullmatch(model_path):
        raise ConfigError(
            f"model.path={model_path!r} is no folder; give the directory of a Hugging Face model"
        )
    offline = _without_hub(model_path)
    from transformers import AutoConfig

    pretrained = load_pretrained(model_path, offline)
    if not pretrained.is_fast:
        raise ConfigError(
            f"model.path={model_path!r} has no fast tokenizer; give a model with a tokenizer.json"
        )
    config = AutoConfig.from_pretrained(model_path, local_files_only=offline).to_dict()
    named = config.get("eos_token_id")
    ends = [pretrained.eos_token_id, *(named if isinstance(named, list) else [named])]
    return _checked(model_path, pretrained.backend_tokenizer, config, [i for i in ends if i is not None])


def _without_hub(model_path: str) -> bool:
    """Return whether a hub's model must come from this machine's cache, since no hub answers.

    Its client would try for half a minute and log each attempt.

    Raises:
        ConfigError: when the cache does not have it either.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    reason = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        asking = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        try:
            urllib.request.urlopen(asking, timeout=HUB_ANSWER_S).close()
            return False
        except urllib.error.HTTPError:
            return False  # it answers
        except (OSError, ValueError) as error:
            reason = f"{constants.ENDPOINT} does not answer: {getattr(error, 'reason', error)}"
    if not isinstance(try_to_load_from_cache(model_path, "config.json"), str):
        raise ConfigError(
            f"model.path={model_path!r} is no folder here and no hub can be asked ({reason}); "
            "download the model elsewhere and give its directory"
        )
    return True


def check_reference(model_path: str, reference_path: str) -> None:
    """Check that a reference model has the policy's vocabulary; "" is the policy's own model.

    Raises:
        ConfigError: naming reference.model, when it has another one, or there is no such model.
    """
    if not reference_path:
        return
    own = TextCodec.load(resolve_model_path(model_path))
    try:
        other = TextCodec.load(resolve_model_path(reference_path))
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", "reference.model")) from error
    sizes = own.vocabulary_size, other.vocabulary_size
    words = [one.tokenizer.get_vocab(with_added_tokens=True) for one in (own, other)]
    if sizes[0] != sizes[1] or words[0] != words[1]:
        apart = len(words[0].items() ^ words[1].items())
        raise ConfigError(
            f"reference.model={reference_path!r} has another vocabulary than model.path={model_path!r} "
            f"({sizes[1]} rows and not {sizes[0]}; {apart} entries differ), so it would score other tokens; "
            "give a model with the same tokenizer"
        )


def _checked(
    model_path: str,
    tokenizer: Tokenizer,
    config: dict[str, Any],
    ends: Sequence[int],
) -> TextCodec:
    rows = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(rows, int):
        raise ConfigError(
            f"model.path={model_path!r}: config.json names no vocab_size; add it to config.json"
        )
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = 1 + max(vocabulary.values(), default=-1)
    if tokens > rows:
        raise ConfigError(
            f"model.path={model_path!r}: its tokenizer has {tokens} tokens, but config.json says "
            f"vocab_size={rows}; put the model's own tokenizer beside it"
        )
    if not ends:
        raise ConfigError(
            f"model.path={model_path!r} names no end token; set eos_token in tokenizer_config.json"
        )
    if outside := [end for end in ends if not 0 <= end < rows]:
        raise ConfigError(
            f"model.path={model_path!r}: end token {outside[0]} lies outside vocab_size={rows}; "
            "put the model's own tokenizer beside it"
        )
    return TextCodec(tokenizer, ends, rows)


def decoder(path: str) -> Callable[[Iterable[int]], str]:
    """Return what turns token ids into text; the model's tokenizer is loaded when it is first needed."""
    codec = cache(lambda: TextCodec.load(resolve_model_path(path)))
    return lambda token_ids: codec().decode(token_ids)
