"""Suite scores: avg@k, pass@k and maj@k of sampled items, with intervals by bootstrap over the items.

N items of a suite, n samples of each, k of which a score speaks. Items are drawn, not samples: what a figure
would be on other problems of the same kind is what an interval says.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from antiphon.core.seeds import generator

RESAMPLES = 1000
"""Suites drawn from the items for an interval."""
LIMITS = (2.5, 97.5)
"""Percentiles of the resampled means: an interval of 95%."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A score of a suite, and the interval of 95% that the choice of its items leaves."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} ({self.low:.4f} to {self.high:.4f})"


@dataclass(frozen=True, slots=True)
class ItemSamples:
    """The samples of one item, of one length each."""

    rewards: tuple[float, ...]
    """Of each sample; 1 is right."""
    answers: tuple[str, ...] | None = None
    """What was found in each, "" where nothing was; None where answers cannot be compared as texts."""


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What a version, or a model, scored on a suite, and how that was found."""

    suite: str
    version: int | None
    """Of the run; None for any other model."""
    file: str
    file_digest: str
    judge: str
    """As `environment.parameters.score`."""
    items: int
    samples: int
    """Of each item."""
    temperature: float
    max_tokens: int
    scores: Mapping[str, Estimate]
    failed: int
    """Answers to which no reward could be given."""
    cut: int
    """Answers that `sampling.max_tokens` cut off."""
    same: int | None
    """Items that the run trains on, word for word; None where it trains on no file that is here."""
    overlapping: int | None
    """Items that share many words in a row with what it trains on."""
    sampled: int = 0
    """Answers that the call sampled which found it."""
    cached: int = 0
    """Answers that were there before."""

    @property
    def average(self) -> str:
        """The mean reward of all answers, and of how many samples of each item."""
        return next(f"{name} {one}" for name, one in self.scores.items())

    def lines(self) -> Iterator[str]:
        """Spell it for a terminal."""
        scores = ", ".join(f"{name} {one}" for name, one in self.scores.items())
        yield f"{self.suite}: {scores}, 95% over {self.items} items"
        cut = f", {self.cut} cut off by sampling.max_tokens" if self.cut else ""
        failed = f", {self.failed} could not be judged" if self.failed else ""
        yield (
            f"  {self.sampled} answers sampled at temperature {self.temperature:g}, {self.cached} from the "
            f"cache{cut}{failed}"
        )

    def texts(self) -> tuple[str, ...]:
        """Return a row of a table, in the order of `SUITE_HEAD`."""
        shown = {name.partition("@")[0]: f"{name} {one}" for name, one in self.scores.items()}
        how = f"{self.items} x {self.samples} at temperature {self.temperature:g}"
        tokens = f"{self.max_tokens}, {self.cut / (self.items * self.samples):.1%} cut off"
        trained = "" if self.same is None else f"{self.same}, and {self.overlapping} in part"
        found = (shown.get(name, "") for name in ("avg", "pass", "maj"))
        return self.suite, f"v{self.version}", how, tokens, trained, *found


SUITE_HEAD = ("suite", "version", "answers", "tokens", "trained on", "average", "one of k", "majority")


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return how probable it is that one of `k` samples is right, estimated without bias from more.

    It is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374).

    >>> pass_at_k(samples=4, right=1, k=1), pass_at_k(samples=4, right=2, k=3)
    (0.25, 1.0)
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def majority(rewards: Sequence[float], answers: Sequence[str]) -> float:
    """Return what the answer that most samples gave earns; of several as frequent ones, their mean.

    Right samples agree, however they spell it, wrong ones up to spaces and case; one without an answer has no
    vote.

    >>> majority([1.0, 0.0, 1.0], ["1/2", "3", "0.5"]), majority([1.0, 0.0], ["4", "5"])
    (1.0, 0.5)
    """
    camps: dict[str | None, list[float]] = defaultdict(list)
    """Rewards of the samples that agree; None are the right ones."""
    for reward, answer in zip(rewards, answers, strict=True):
        if answer:
            camps[None if reward >= 1.0 else "".join(answer.casefold().split())].append(reward)
    most = max(map(len, camps.values()), default=0)
    return float(np.mean([np.mean(camp) for camp in camps.values() if len(camp) == most] or 0.0))


def suite_scores(items: Sequence[ItemSamples], seed: int) -> dict[str, Estimate]:
    """Return avg@n, maj@n where answers can be compared, and pass@k for 1, 2, 4, .. and n.

    Args:
        items: at least one, each with as many samples, n.
        seed: names the stream that the resampled items are drawn from.
    """
    n = len(items[0].rewards)
    columns = {f"avg@{n}": [float(np.mean(item.rewards)) for item in items]}
    for k in sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n}):
        right = (sum(reward >= 1.0 for reward in item.rewards) for item in items)
        columns[f"pass@{k}"] = [pass_at_k(n, count, k) for count in right]
    if all(item.answers is not None for item in items):
        columns[f"maj@{n}"] = [majority(item.rewards, item.answers or ()) for item in items]
    values = np.array([*columns.values()])  # [scores, N]
    random, count = generator("suite-bootstrap", seed), len(items)
    drawn = np.array([values[:, random.integers(0, count, count)].mean(axis=1) for _ in range(RESAMPLES)])
    bounds = np.percentile(drawn, LIMITS, axis=0)
    return {
        name: Estimate(*map(float, (values[place].mean(), bounds[0, place], bounds[1, place])))
        for place, name in enumerate(columns)
    }
