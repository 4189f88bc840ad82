"""File environment: prompts and reference answers from files, without a class.

The rows of a file are problems, in its order. `environment.parameters` names the files (`train` and
`heldout`; `system.rows` says what they may be), the keys under which a row has its question, answer and id,
and what scores an answer: `exact`, `number` or `choice` (see `environments.answers`), `math` (see
`environments.math_judge`), `programs`, which runs it on the row's tests (see `environments.programs`),
`judge` (the model of the configuration's section `judge`), or `package.module:function`, which gets a
completion's text and the row as a dict and returns a number in 0..1.

`heldout` may be a share in place of a file, and is a tenth where it is left out. Then a hash of each question
says whether its row is held out, so that a question that comes twice is on one side only.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from antiphon.core.config_sections import FILE, JUDGE, MOST_PROMPTS
from antiphon.core.errors import ConfigError, ContractError
from antiphon.environments import answers, math_judge
from antiphon.environments.contamination import WORDS, Contamination, contamination
from antiphon.environments.environment import SPLITS, Problem, SplitEnvironment, check_names, key_of
from antiphon.environments.outside import import_named
from antiphon.environments.programs import CREDITS, PROGRAMS, Tests, read_tests, share_passed
from antiphon.system.rows import Rows, split_files

PARAMETERS: Mapping[str, Any] = {
    "train": None,
    "heldout": 0.1,
    "question": "question",
    "answer": "answer",
    "score": None,
    "id": None,
    "prompt_prefix": "",
    "prompt_suffix": "",
    "tests": "tests",
    "credit": "all",
}
"""What `environment.parameters` takes, and defaults; `train` and `score` must be given."""
MATH = "math"
KINDS = (*answers.KINDS, MATH)
ID_CHARS = 100
MOST_UNREAD = 0.05
"""Share of references of a split that may be such that nothing but their own text is found right."""
COMPARED = 50_000
"""Training rows that are looked at for what held-out prompts have in common with them."""
_T = TypeVar("_T")
_SCORES = f"{', '.join(KINDS)}, {PROGRAMS}, {JUDGE} or package.module:function"
_NONE = {
    "exact": "which is empty",
    "number": "which is no number, alone or behind ####",
    MATH: "which is empty",
    "choice": "which is neither a letter A to J nor a number that counts from 0",
}


class FileEnvironment(SplitEnvironment):
    """Problems from files."""

    name = FILE

    def __init__(self, parameters: Mapping[str, Any], seed: int, train_size: int, heldout_size: int) -> None:
        """Open the files; the size `MOST_PROMPTS` stands for all rows.

        Raises:
            ConfigError: when a parameter is wrong or missing, a file or the score function cannot be used, a
                split has fewer rows than its size says, or, where a share is held out, a question is none.
        """
        check_names(parameters, PARAMETERS)
        values = self._values = {**PARAMETERS, **parameters}
        for name, wanted in (("train", "name a file of JSON lines or Parquet"), ("score", f"give {_SCORES}")):
            if values[name] is None:
                raise ConfigError(f"environment.parameters.{name} is missing: {wanted}")
        named = {name: values[name] for name in ("question", "answer", "id") if values[name] is not None}
        others = {name: values[name] for name in ("prompt_prefix", "prompt_suffix", "tests")}
        for name, value in {**named, **others}.items():
            if not isinstance(value, str):
                raise ConfigError(f"environment.parameters.{name}={value!r} is no text")
        score = values["score"]
        self.runs_programs = score == PROGRAMS
        """Whether its answers are programs, which takes runners."""
        if values["credit"] not in CREDITS:
            raise ConfigError(f"environment.parameters.credit={values['credit']!r} is neither all nor share")
        self._function = None if score in (*KINDS, PROGRAMS, JUDGE) else _function(score)
        self.only_compares = score in (*answers.KINDS, JUDGE)  # nothing is judged here where a model does it
        files = split_files(values)
        columns = [*named.values()] if score in (*KINDS, JUDGE) else None
        rows = [Rows(found, columns) for found in files.values()]
        self._rows = dict(zip(SPLITS, [*rows, rows[0]], strict=False))
        self._places: dict[str, npt.NDArray[np.int64]] = {}
        """The rows of each split, where a share of one file is held out."""
        if len(rows) == 1:
            texts = (self._of_row(self._question, rows[0], number) for number in range(len(rows[0])))
            held_out = _hashes(texts) < np.uint64(values["heldout"] * 2**64)
            self._places = {"train": np.flatnonzero(~held_out), "heldout": np.flatnonzero(held_out)}
        sizes = []
        for split, size in zip(SPLITS, (train_size, heldout_size), strict=True):
            there = len(self._places.get(split, self._rows[split]))
            if not there or there < size != MOST_PROMPTS:
                raise ConfigError(
                    f"environment.{split}_size={'all' if size == MOST_PROMPTS else size}, but this split has "
                    f"{there} rows of {self._rows[split]}; lower it, or leave it out (null) for all rows"
                )
            sizes.append(min(size, there))
        super().__init__(seed, *sizes)
        self._tests_at = lru_cache(maxsize=1)(self._read_tests)  # those of a group are read once

    def make(self, split: str, index: int) -> Problem:
        """Return the problem of a row.

        Raises:
            ConfigError: naming row, file and key, when it is none.
        """

        def problem(row: Mapping[str, Any]) -> Problem:
            key, named = key_of(split, self.seed, index), self._values["id"]
            if named is not None:
                key += f":{' '.join(_text(row, named).split())[:ID_CHARS]}"
            return Problem(key, self._question(row), self._answer(row))

        return self._of_row(problem, self._rows[split], self._place(split, index))

    def problem_by_key(self, key: str) -> Problem:
        found = super().problem_by_key(key.partition(":")[0])
        if found.key != key:
            raise ContractError(
                f"prompt key {key[:80]!r} is {found.key!r} here; both sides of a run need the same files"
            )
        return found

    def reward(self, problem: Problem, completions: Sequence[str]) -> list[float]:
        """Return what each completion is worth: 1.0 or 0.0, or what the function says."""
        kind = self._values["score"]
        if kind == JUDGE:
            raise ContractError(f"environment.parameters.score={JUDGE}: the model of judge.url gives rewards")
        if kind == MATH:
            return [float(math_judge.judge(text, problem.answer)) for text in completions]
        if self.only_compares:
            found = (answers.answer_in(text, kind) for text in completions)
            return [float(answers.is_right(answer, problem.answer, kind)) for answer in found]
        split, index = self.place_of(problem.key.partition(":")[0])
        rows, place = self._rows[split], self._place(split, index)
        if self._function is None:
            tests, whole = self._tests_at(split, place), self._values["credit"] == "all"
            return [share_passed(text, tests, all_or_nothing=whole) for text in completions]
        row = rows[place]
        return [self._function(text, dict(row)) for text in completions]

    def answers_in(self, completions: Sequence[str]) -> tuple[str, ...] | None:
        """Return the answer in each completion, "" where there is none; None where it is not looked for."""
        kind = self._values["score"]
        if kind == MATH:
            return tuple(map(math_judge.answer_in, completions))
        return tuple(answers.answer_in(text, kind) for text in completions) if kind in KINDS else None

    def explain(self, problem: Problem, completion: str, reward: float) -> str:
        """Say what was found in a completion, and what was wanted."""
        wanted, found = f"wanted {problem.answer!r}", self.answers_in([completion])
        if found is None:
            return "" if reward >= 1.0 or not problem.answer else wanted
        said = f"found {found[0][:ID_CHARS]!r}" if found[0] else "found no answer"
        return said if reward >= 1.0 else f"{said}, {wanted}"

    def warm_up(self) -> None:
        """Load what scoring needs, in the process whose forks score."""
        if self._values["score"] == MATH:
            math_judge.warm_up()

    def question(self, split: str, index: int) -> str:
        """Return the question of a problem alone, without what stands around it in every prompt."""
        return self._of_row(
            lambda row: _text(row, self._values["question"]), self._rows[split], self._place(split, index)
        )

    def where(self, split: str, index: int) -> str:
        """Return row and file of a problem."""
        return self._rows[split].where(self._place(split, index))

    def most_bytes(self, split: str) -> npt.NDArray[np.int64]:
        """Return how many bytes of UTF-8 each prompt of a split has at most, without reading them."""
        found = self._rows[split].most_bytes(self._values["question"])
        found = found[self._places.get(split, slice(None))][: self.size(split)]
        around = self._values["prompt_prefix"] + self._values["prompt_suffix"]
        return found + len(around.encode())

    def try_out(self) -> list[str]:
        """Read every row once, as a run will, and return what is worth a note, in sentences.

        Raises:
            ConfigError: naming a row that is no problem, or two of different splits with the same prompt; or
                where more than `MOST_UNREAD` of a split's references cannot be compared.
        """
        notes = [note for split in SPLITS for note in self.check_answers(split, self.size(split))]
        train, heldout = (
            _hashes(self.make(split, index).text for index in range(self.size(split))) for split in SPLITS
        )
        shared, ours, theirs = np.intersect1d(train, heldout, return_indices=True)
        if len(shared):
            raise ConfigError(
                f"{self.where('heldout', int(theirs[0]))} has the same prompt as "
                f"{self.where('train', int(ours[0]))}; held-out prompts must not be trained on: take one out"
            )
        _, said = self.alike(self, self.size("heldout"), -(-self.size("train") // COMPARED))
        return [*notes, said] if said else notes

    def alike(self, other: "FileEnvironment", count: int, step: int = 1) -> tuple[Contamination, str]:
        """Compare the first held-out prompts with each `step`th of another's training prompts."""
        trained = (other.question("train", index) for index in range(0, other.size("train"), step))
        found = contamination((self.question("heldout", index) for index in range(count)), trained)
        if not (both := {**found.overlapping, **found.same}):
            return found, ""
        first, row = min(both.items())
        return found, (
            f"{len(both)} of {count} held-out prompts share {WORDS} words in a row, or all, with a training "
            f"prompt, such as {self.where('heldout', first)} with {other.where('train', row * step)}: "
            "scores of them may be of what was trained on"
        )

    def check_answers(self, split: str, count: int) -> list[str]:
        """Read the first tests or references of a split, and say which references only their text can match.

        Raises:
            ConfigError: naming a row whose tests are none; or where too many of all cannot be compared.
        """
        if self.runs_programs:
            for index in range(count):
                self._read_tests(split, self._place(split, index))
        if self._values["score"] != MATH:
            return []
        unread = [i for i in range(count) if not math_judge.can_compare(self.make(split, i).answer)]
        if not unread:
            return []
        first = "; ".join(
            f"{self.make(split, i).answer[:80]!r} in {self.where(split, i)}" for i in unread[:3]
        )
        said = (
            f"{len(unread)} of {count} {split} references can be matched by nothing but their text: {first}"
        )
        if len(unread) > MOST_UNREAD * self.size(split):
            raise ConfigError(
                f"{said}; more than {MOST_UNREAD:.0%}: repair environment.parameters.answer="
                f"{self._values['answer']} in these rows, or score them otherwise"
            )
        return [said]

    def _place(self, split: str, index: int) -> int:
        return int(self._places[split][index]) if self._places else index

    def _of_row(self, make: Callable[[Mapping[str, Any]], _T], rows: Rows, number: int) -> _T:
        row = rows[number]
        try:
            return make(row)
        except ValueError as error:
            raise ConfigError(f"{rows.where(number)}: {error}") from error

    def _read_tests(self, split: str, place: int) -> Tests:
        def read(row: Mapping[str, Any]) -> Tests:
            return read_tests(row, self._values["tests"], self._answer(row))

        return self._of_row(read, self._rows[split], place)

    def _question(self, row: Mapping[str, Any]) -> str:
        text = _text(row, key := self._values["question"])
        if not text.strip():
            raise ValueError(f"{key!r} is empty")
        return f"{self._values['prompt_prefix']}{text}{self._values['prompt_suffix']}"

    def _answer(self, row: Mapping[str, Any]) -> str:
        key, kind = self._values["answer"], self._values["score"]
        if kind not in KINDS:  # what scores may look elsewhere, or do without
            return _text(row, key) if isinstance(row.get(key), str) else ""
        listed = kind == MATH and isinstance(row.get(key), list)
        text = " ".join(_text({key: one}, key) for one in row[key]) if listed else _text(row, key)
        answer = math_judge.reference_of(row[key]) if kind == MATH else answers.reference_of(row[key], kind)
        if answer is None:
            raise ValueError(f"{key!r} is {text[:80]!r}, {_NONE[kind]}")
        return answer


def located(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return parameters that mean the same in any working directory, and the files that they name."""
    files = {split: [str(path) for path in found] for split, found in split_files(parameters).items()}
    return {**parameters, **files}, tuple(path for found in files.values() for path in found)


def _text(row: Mapping[str, Any], key: str) -> str:
    """Return what a row has under a key, as text; a ValueError says why there is none."""
    if key not in row:
        raise ValueError(f"there is no key {key!r}; it has {', '.join(row)[:200] or 'none'}")
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{key!r} is of type {type(value).__name__}, which is neither text nor a number")
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"{key!r} holds {half!a}, half a character, as cut JSON has it") from None
    return text


def _hashes(texts: Iterable[str]) -> npt.NDArray[np.uint64]:
    digests = (blake3(text.encode()).digest(length=8) for text in texts)
    return np.fromiter((int.from_bytes(digest, "little") for digest in digests), np.uint64)


def _function(named: Any) -> Callable[[str, dict[str, Any]], float]:
    called = f"environment.parameters.score={named}"
    if not isinstance(named, str) or ":" not in named:
        close = difflib.get_close_matches(str(named), [*KINDS, PROGRAMS, JUDGE], n=1)
        hint = f"did you mean {close[0]}?" if close else f"give {_SCORES}"
        raise ConfigError(f"{called} is unknown; {hint}")
    found: Callable[[str, dict[str, Any]], float] = import_named(called, named, "function")
    try:
        inspect.signature(found).bind("", {})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{called} cannot be called with (answer text, row): {error}") from error
    return found
