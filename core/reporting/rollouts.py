"""Rollouts: which of a run's trajectories a reader asks for, in which order, and how two of them differ."""

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from antiphon.core.errors import ConfigError

_NAMES = "name part step version staleness reward sample tokens group prompt reason head"
_TYPES = "O O i8 i8 i8 f8 i8 i8 O O O O"
ROLLOUT = np.dtype({"names": _NAMES.split(), "formats": _TYPES.split()})
"""A trajectory in a table of all.

name: t7.12 is row 12 of what step 7 trained on, f7.12 of what was filtered then, v7.12 of what was held out
of version 7. part: trained, filtered or held-out. step: that it was sampled for; -1 for a held-out answer.
version: the oldest one that sampled it, -1 where none did; of a held-out answer, the one evaluated.
staleness: step less version; -1 where one of them is not known. sample: its number in the group. prompt: a
key. reason: why it ended, or could not be scored, and what the environment said. head: how the answer begins,
"" until it is read.
"""
Table = npt.NDArray[Any]
COMPARED = 250_000
"""Most pairs of tokens that are compared: beyond it, all between the first and the last change is marked."""
_RANGE = re.compile(r"(-?\d+(?:\.\d+)?)?(\.\.)?((?<=\.\.)-?\d+(?:\.\d+)?)?")


def _range(text: str) -> tuple[float, float] | None:
    found = _RANGE.fullmatch(text.strip())
    if found is None or found[0] == "..":
        raise ValueError("write a number, or a range such as 1..4, 2.. or ..0.5")
    low, dots, high = found.groups()
    return (float(low or "-inf"), float(high or "inf") if dots else float(low)) if found[0] else None


Range = Annotated[tuple[float, float] | None, BeforeValidator(_range)]
Part = Annotated[str, Field(max_length=400)]
"""Found anywhere in a text."""


class Query(BaseModel):
    """What a reader asks for, each field as an address spells it; an empty one says nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str = ""
    """The run that is meant."""
    part: Literal["", "trained", "filtered", "held-out"] = ""
    step: Range = None
    version: Range = None
    staleness: Range = None
    reward: Range = None
    prompt: Part = ""
    reason: Part = ""
    text: Part = ""
    """In its prompt or its answer, in letters of either case."""
    sort: Literal["", "-step", "reward", "-reward", "-staleness", "tokens", "-tokens"] = ""
    """What comes first; equal ones as recorded."""
    offset: int = Field(0, ge=0, le=2**31)
    """Trajectories that are passed over."""


def read_query(parameters: Mapping[str, str]) -> Query:
    """Return the query of an address.

    Raises:
        ConfigError: naming the first parameter that means nothing.
    """
    try:
        return Query.model_validate(dict(parameters))
    except ValidationError as error:
        first, known = error.errors()[0], ", ".join(Query.model_fields)
        what = f"{'.'.join(map(str, first['loc']))}={str(first['input'])[:80]!r}"
        raise ConfigError(f"{what} means nothing here: {first['msg']}; there are {known}") from error


def select(table: Table, query: Query, among: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.intp]:
    """Return the places of all trajectories that a query means, in its order.

    `among`: which of the table have the query's text, [N]; None: all are taken to have it.
    """
    kept = np.ones(table.size, dtype=bool) if among is None else among.copy()
    for name in ("step", "version", "staleness", "reward"):
        if (wanted := getattr(query, name)) is not None:
            values = table[name]
            kept &= (values >= wanted[0]) & (values <= wanted[1]) & ((name == "reward") | (values >= 0))
    if query.part:
        kept &= table["part"] == query.part
    for name in ("prompt", "reason"):
        if wanted := getattr(query, name):
            kept &= np.array([wanted in text for text in table[name]], dtype=bool)
    places = np.flatnonzero(kept)
    if query.sort:
        values = table[query.sort.lstrip("-")][places]
        places = places[np.argsort(-values if query.sort[0] == "-" else values, kind="stable")]
    return places


def group_of(table: Table, place: int) -> list[int]:
    """Return the places of the trajectories of one's group, in its order."""
    places = np.flatnonzero(table["group"] == table["group"][place]).tolist()
    return sorted(places, key=lambda one: int(table["sample"][one]))


def over_versions(table: Table, place: int) -> list[int]:
    """Return the places of one trajectory of the prompt for each version, ascending; `place` is among them.

    Of several of a version it is the one with the same number in its group, else the first.
    """
    places, best = np.flatnonzero(table["prompt"] == table["prompt"][place]).tolist(), dict[int, int]()
    for one in sorted(places, key=lambda one: (one != place, table["sample"][one] != table["sample"][place])):
        best.setdefault(int(table["version"][one]), one)
    return [best[version] for version in sorted(best)]


def differing(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges [start, stop) of `after` that are not in `before`, in order.

    >>> differing([1, 2, 3, 4], [1, 9, 3, 4, 5])
    [(1, 2), (4, 5)]
    """
    room = min(len(before), len(after))
    head = next((i for i in range(room) if before[i] != after[i]), room)
    room -= head
    tail = next((i for i in range(room) if before[-1 - i] != after[-1 - i]), room)
    one, other = before[head : len(before) - tail], after[head : len(after) - tail]
    if len(one) * len(other) > COMPARED:
        return [(head, head + len(other))]
    changes = SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
    return [(head + j, head + k) for kind, _, _, j, k in changes if kind != "equal" and j < k]
