"""Kept samples: which few completions of many are worth reading: the best, the worst, and some at random.

Where rewards are equal a number drawn from the run's seed decides, so the same run chooses the same
completions again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from antiphon.core.seeds import derive_seed

KINDS = ("best", "worst", "random")
"""As what a completion is kept."""
_HALF = 1 << 32


@dataclass(frozen=True, slots=True)
class Candidate:
    """One completion that may be kept."""

    name: str
    """Finds it again; unique among those it is compared with."""
    reward: float
    drawn: int
    """Its number of `drawn_number`."""


def drawn_number(run_seed: int, prompt_key: str, sample_index: int) -> int:
    """Return the 64 random bits of a completion; the same prompts are drawn at every version."""
    return derive_seed("kept-sample", run_seed, prompt_key, sample_index)


def choose(candidates: Iterable[Candidate], count: int) -> dict[str, Sequence[Candidate]]:
    """Return up to `count` candidates for each of KINDS; one may be there as several.

    >>> found = choose([Candidate("a", 0.0, 7), Candidate("b", 1.0, 5), Candidate("c", 0.5, 6)], 1)
    >>> {kind: [candidate.name for candidate in chosen] for kind, chosen in found.items()}
    {'best': ['b'], 'worst': ['a'], 'random': ['b']}
    """
    # The upper half of the drawn bits orders equal rewards, the lower one draws at random.
    ordered = sorted(candidates, key=lambda c: (c.drawn // _HALF, c.name))
    best = sorted(ordered, key=lambda c: -c.reward)
    worst = sorted(reversed(ordered), key=lambda c: c.reward)
    random = sorted(ordered, key=lambda c: (c.drawn % _HALF, c.name))
    return {kind: found[:count] for kind, found in zip(KINDS, (best, worst, random), strict=True)}
