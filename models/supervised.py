"""Supervised rows: prompts with completions, and conversations, as token ids with what of them is learned.

What the assistant wrote is found by writing a conversation up to its turn, and with it, in the model's own
form: what the second has beyond the first is the turn, up to the token that ends it. So no template need mark
turns itself. One whose earlier text changes once more follows cannot be masked, and is refused.

Legend: T tokens of a row.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError
from antiphon.core.records import BatchRow, FinishReason, Observed, VersionSpan
from antiphon.models.chat_template import ChatTemplate
from antiphon.models.codec import TextCodec
from antiphon.system.rows import Rows

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, eq=False)
class SupervisedRow:
    """One row of a file."""

    token_ids: npt.NDArray[np.int32]
    """[T] all of it, up to the last token that is learned."""
    learned: Observed
    """Ranges [start, stop) of tokens that are learned, in order; the last one ends at T."""

    @property
    def learned_tokens(self) -> int:
        return sum(stop - start for start, stop in self.learned)

    def batch_row(self, number: int, version: int) -> BatchRow:
        """Return it as the learner trains on it: what is learned stands as sampled, the rest as observed."""
        begin = self.learned[0][0]
        spans = tuple(VersionSpan(version, start - begin, stop - begin) for start, stop in self.learned)
        between = zip(self.learned[:-1], self.learned[1:], strict=True)
        count = len(self.token_ids) - begin
        return BatchRow(
            self.token_ids[begin:],
            np.zeros(count, dtype=np.float32),
            spans,
            FinishReason.STOP,
            observed=tuple((stop - begin, start - begin) for (_, stop), (start, _) in between),
            group_id=f"row-{number}",
            prompt_key="",
            sample_index=0,
            prompt_token_ids=self.token_ids[:begin],
            reward=0.0,
            advantage=1.0,
        )


class SupervisedRows:
    """Many rows, end to end in three arrays: 4 bytes a token, 8 a turn and 16 a row."""

    def __init__(self, rows: Iterable[SupervisedRow] = ()) -> None:
        """Take rows one by one; none of them is kept."""
        tokens, turns, ends = array("i"), array("i"), array("q", (0, 0))
        for row in rows:
            tokens.frombytes(row.token_ids.tobytes())
            turns.extend(place for turn in row.learned for place in turn)
            ends.extend((len(tokens), len(turns)))
        self._tokens: npt.NDArray[np.int32] = np.asarray(tokens, np.int32)  # the same memory
        self._turns: npt.NDArray[np.int32] = np.asarray(turns, np.int32).reshape(-1, 2)
        self._ends: npt.NDArray[np.int64] = np.asarray(ends, np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> SupervisedRow:
        (start, first), (stop, last) = self._ends[number : number + 2].tolist()
        turns = self._turns[first // 2 : last // 2].tolist()
        return SupervisedRow(self._tokens[start:stop], tuple((begin, end) for begin, end in turns))

    def __iter__(self) -> Iterator[SupervisedRow]:
        return map(self.__getitem__, range(len(self)))

    @property
    def learned_tokens(self) -> int:
        return int((self._turns[:, 1] - self._turns[:, 0]).sum())

    def digest(self) -> str:
        """Return the digest of all tokens, and of which are learned."""
        arrays = (self._tokens, self._turns, self._ends)
        return digest_bytes("".join(digest_bytes(one.view(np.uint8).data) for one in arrays).encode())


class SupervisedReader:
    """Makes rows of files, for one model."""

    def __init__(
        self,
        codec: TextCodec,
        template: ChatTemplate | None,
        ends: Collection[int],
        turns: Literal["all", "last"] = "all",
        max_tokens: int = 1 << 30,
    ) -> None:
        """Read for a tokenizer and its chat template, if it has one.

        Args:
            codec: the model's tokenizer.
            template: None for a model without: it takes prompts with completions alone, as plain text.
            ends: token ids that end a turn; a plain completion gets the first.
            turns: which of the assistant's turns are learned.
            max_tokens: longest row.
        """
        self._codec, self._template, self._ends = codec, template, tuple(ends)
        self._turns, self._max_tokens = turns, max_tokens

    def read(self, files: Rows, field: str) -> Iterator[SupervisedRow]:
        """Yield the rows of files, named by `field` in errors.

        Raises:
            ConfigError: naming the first row that cannot be learned from, and why.
        """
        for number, given in enumerate(files):
            try:
                row = self.row(given)
                if len(row.token_ids) > self._max_tokens:
                    raise ConfigError(
                        f"it has {len(row.token_ids)} tokens, more than {self._max_tokens}, the smaller of "
                        "data.max_tokens and the positions of model.path; shorten it, or raise the first"
                    )
                if row.learned[0][0] == 0:
                    raise ConfigError("nothing stands before its first turn; a row begins with a prompt")
                self._check_characters(row, given)
            except ConfigError as error:
                raise ConfigError(f"{field}: {files.where(number)}: {error}") from error
            yield row

    def _check_characters(self, row: SupervisedRow, given: Mapping[str, Any]) -> None:
        if self._codec.unknown_id is not None and self._codec.unknown_id not in row.token_ids:
            return
        texts = [one.get("content") for one in given.get("messages") or ()]
        for text in filter(None, texts or (given["prompt"], given["completion"])):
            if places := self._codec.lost_characters(text):
                raise ConfigError(
                    f"the tokenizer of model.path has no token for {text[places[0]]!r} in {text[:80]!r}; "
                    "leave it out, or take another model"
                )

    def row(self, given: Mapping[str, Any]) -> SupervisedRow:
        """Return what a row holds.

        Raises:
            ConfigError: when it has neither form, a message has no known role or no text, or the template
                cannot mask turns.
        """
        if given.get("messages") is not None:  # a table has null where a row has no such key
            return self._conversation(_messages(given["messages"]), _objects(given.get("tools"), "tools"))
        prompt, completion = given.get("prompt"), given.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str) or not completion:
            raise ConfigError(
                "it has no `messages`, and `prompt` and `completion` are not both text; give one or the other"
            )
        if self._template is not None:
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            return self._conversation(messages, None)
        before = self._codec.encode(self._codec.shielded(prompt))
        after = self._codec.encode(self._codec.shielded(completion), add_special_tokens=False)
        ids = (*before, *after, *self._ends[:1])
        return SupervisedRow(np.array(ids, np.int32), ((len(before), len(ids)),))

    def _conversation(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> SupervisedRow:
        if self._template is None:
            raise ConfigError(
                "it has `messages`, and model.path has no chat template; give `prompt` and `completion`, or "
                "a model with one"
            )
        shielded = [
            {**one, "content": self._codec.shielded(one["content"])}
            if isinstance(one.get("content"), str)
            else one
            for one in messages
        ]
        places = [place for place, one in enumerate(messages) if one["role"] == "assistant"]
        if not places:
            raise ConfigError("none of its messages is the assistant's, so there is nothing to learn")
        chosen, learned = places if self._turns == "all" else places[-1:], list[tuple[int, int]]()
        whole: list[int] = []
        for place in reversed(chosen):
            before = self._template.render_ids(shielded[:place], tools=tools)
            after = self._template.render_ids(shielded[: place + 1], tools=tools, add_generation_prompt=False)
            whole = whole or after
            stop = max(
                (at + 1 for at in range(len(before), len(after)) if after[at] in self._ends),
                default=len(after),
            )
            if after[: len(before)] != before or whole[:stop] != after[:stop] or stop == len(before):
                raise ConfigError(
                    f"the chat template of model.path writes what stands before turn {place + 1} otherwise "
                    "once that turn, or a later one, follows, so that it cannot be masked; "
                    + ("use data.turns=last, or " if self._turns == "all" and len(places) > 1 else "")
                    + "give another template in chat_template.jinja"
                )
            learned.append((len(before), stop))
        return SupervisedRow(np.array(whole[: learned[0][1]], np.int32), tuple(reversed(learned)))


def _objects(given: Any, name: str) -> Any:
    if given is not None and not (isinstance(given, list) and all(isinstance(one, dict) for one in given)):
        raise ConfigError(f"`{name}` must be a list of objects")
    return given


def _messages(given: Any) -> list[Mapping[str, Any]]:
    for one in _objects(given, "messages"):
        if one.get("role") not in ROLES:
            raise ConfigError(f"a message has the role {one.get('role')!r}; use one of {', '.join(ROLES)}")
        if not isinstance(one.get("content"), str) and not one.get("tool_calls"):
            raise ConfigError(f"a message of {one['role']} has neither text in `content` nor `tool_calls`")
    # Templates ask whether a key is there, and of a table every message has all of them.
    return [
        {key: value for key, value in one.items() if key == "content" or value is not None} for one in given
    ]
