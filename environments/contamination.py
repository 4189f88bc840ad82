"""Contamination: which prompts of an evaluation occur, whole or in part, among those that are trained on.

Texts are compared by their words: letters without case and digits. A prompt is the same as another when all
its words and signs of calculation are, and overlaps it when 13 words in a row are, the length since GPT-3's
report (Brown et al. 2020, arXiv 2005.14165, appendix C). Words in a row that more than three different
prompts of either side have are a template, and say nothing.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

WORDS = 13
"""Words in a row that two independent prompts hardly ever have in common."""
IN_TEMPLATE = 3
"""Prompts of one side that have the same words in a row at most; what more have is a template."""
_SIGNS = "-+*/^<>="
_WORD = re.compile(rf"\w+|[{_SIGNS}]")


@dataclass(frozen=True, slots=True)
class Contamination:
    """What an evaluation has in common with training prompts: index of a prompt to that of the first one."""

    same: Mapping[int, int]
    """All words are the same."""
    overlapping: Mapping[int, int]
    """`WORDS` words in a row are the same, and not all."""


def words_of(text: str) -> tuple[str, ...]:
    """Return the words and signs that count in a comparison.

    >>> words_of("What is  $X+1$?") == words_of("what is x + 1")
    True
    """
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def contamination(evaluated: Iterable[str], trained: Iterable[str]) -> Contamination:
    """Compare every prompt of an evaluation with every training prompt, each of which is read once."""
    texts: dict[int, int] = {}
    """Prompts of the evaluation, by what tells different ones apart."""
    whole: dict[int, list[int]] = defaultdict(list)
    parts: dict[int, list[int]] = defaultdict(list)
    for index, text in enumerate(evaluated):
        if words := words_of(text):
            texts[index] = hash(words)
            whole[texts[index]].append(index)
            for part in {*_parts(words)}:
                parts[part].append(index)
    telling = {part: found for part, found in parts.items() if len({texts[i] for i in found}) <= IN_TEMPLATE}
    same: dict[int, int] = {}
    met: dict[int, dict[int, int]] = defaultdict(dict)
    """Words in a row -> training prompts that have them, by their words, and the row of each."""
    for row, text in enumerate(trained):
        words = words_of(text)
        for index in whole.get(hash(words), ()):
            same.setdefault(index, row)
        for part in telling.keys() & {*_parts(words)}:
            met[part].setdefault(hash(words), row)
    overlapping: dict[int, int] = {}
    for part, rows in met.items():
        first = min(rows.values())
        for index in telling[part] if len(rows) <= IN_TEMPLATE else ():
            if index not in same:
                overlapping[index] = min(first, overlapping.get(index, first))
    return Contamination(same, overlapping)


def _parts(words: tuple[str, ...]) -> Iterator[int]:
    words = tuple(one for one in words if one not in _SIGNS)
    return (hash(words[place : place + WORDS]) for place in range(len(words) - WORDS + 1))
