"""History: each prompt's rewarded completions of earlier epochs, bounded in memory, read as snapshots.

Drafts are made from it and verified afterwards, so nothing here can change a token: what is
missing or wrong only costs speed. A snapshot never changes, whatever is added later.

Policy when the memory is full: epochs that a newer one of the same prompt has superseded go
first, those that were superseded longest ago before the others, each prompt's oldest first.
When none is left, a newcomer is turned away. Least recently used would be the wrong rule here:
an epoch visits every prompt once in random order, so the prompt just visited is needed last.
With room for half of the prompts a lasting half is found each time, least recently used 15%.

Legend: T tokens of one completion, N completions of one prompt and epoch.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from antiphon.core.records import IntArray, PastCompletion, PromptHistory

ENTRY_BYTES = 1536
"""Charged for each prompt and epoch beside its arrays' elements: keys, objects, array headers."""
COMPLETION_BYTES = 28
"""Charged for each completion beside its tokens: version, sample index, reward, offset."""
_SMALLEST_WEIGHT = 1e-12


@dataclass(frozen=True, slots=True)
class HistoryChange:
    """What an addition did, so that a journal can follow."""

    kept: bool
    """Whether the completions are in the store and were not before."""
    gone: tuple[tuple[str, int], ...]
    """(prompt key, epoch) of what left the store to make room or because it is too old."""


@dataclass(frozen=True, slots=True, eq=False)
class _Epoch:
    """The completions of one prompt in one epoch, in the order of their sample indices."""

    tokens: IntArray
    """[sum of T] int32, read-only; completion n is tokens[offsets[n]:offsets[n + 1]]."""
    offsets: npt.NDArray[np.int64]
    """[N + 1]."""
    versions: npt.NDArray[np.int64]
    sample_indices: IntArray
    rewards: npt.NDArray[np.float64]

    @property
    def charge(self) -> int:
        return ENTRY_BYTES + self.tokens.nbytes + COMPLETION_BYTES * len(self.versions)

    def completions(self, epoch: int) -> list[PastCompletion]:
        """Return views of the completions; they stay valid when the store forgets this epoch."""
        bounds = pairwise(self.offsets.tolist())
        facts = zip(self.versions.tolist(), self.sample_indices.tolist(), self.rewards.tolist(), strict=True)
        return [
            PastCompletion(self.tokens[start:stop], version, epoch, sample_index, reward)
            for (start, stop), (version, sample_index, reward) in zip(bounds, facts, strict=True)
        ]


class HistoryStore:
    """Completions by prompt and epoch, at most this many bytes of them.

    `add` and `snapshot` cost time in proportion to the completions they name, and to the epochs
    kept of one prompt; neither looks at other prompts.
    """

    def __init__(self, epochs: int, responses: int, limit_bytes: int) -> None:
        """Start empty.

        Keeps the newest `epochs` (>= 1) of each prompt, of at most `limit_bytes` in all. A snapshot has at
        most `responses` (>= 1) completions.
        """
        self._epochs = epochs
        self._responses = responses
        self._limit = limit_bytes
        self._prompts: dict[str, dict[int, _Epoch]] = {}
        self._superseded: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._used = 0

    def __len__(self) -> int:
        """Return the number of prompts with history."""
        return len(self._prompts)

    @property
    def bytes_used(self) -> int:
        """The store's charge; never more than its limit."""
        return self._used

    def epochs_of(self, prompt_key: str) -> tuple[int, ...]:
        """Return the epochs kept of a prompt, newest first."""
        return tuple(sorted(self._prompts.get(prompt_key, ()), reverse=True))

    def add(
        self, prompt_key: str, epoch: int, completions: Sequence[PastCompletion], evaluated: bool = False
    ) -> HistoryChange:
        """Take the rewarded completions of one prompt and epoch; the first of an epoch stay.

        Args:
            prompt_key: the prompt.
            epoch: epoch of the group; for a held-out prompt, the version that was evaluated.
            completions: in any order; their own `epoch` is not read. Tokens are copied.
            evaluated: the prompt is held out and has one sample per epoch; as many epochs are
                kept as a snapshot has responses.
        """
        known = self._prompts.get(prompt_key, {})
        if epoch in known or not completions:
            return HistoryChange(False, ())
        window = max(self._epochs, self._responses) if evaluated else self._epochs
        if sum(other > epoch for other in known) >= window:
            return HistoryChange(False, ())
        entry = _pack(completions)
        known = self._prompts.setdefault(prompt_key, {})
        if known:
            self._superseded[prompt_key, min(max(known), epoch)] = None
        known[epoch] = entry
        self._used += entry.charge
        gone = []
        while len(self._prompts[prompt_key]) > window:
            gone.append(self._drop_oldest(prompt_key))
        while self._used > self._limit and self._superseded:
            longest_ago, _ = next(iter(self._superseded))
            gone.append(self._drop_oldest(longest_ago))
        if self._used > self._limit:
            self._drop_oldest(prompt_key)  # nothing else of this prompt is left: it is the newcomer
            return HistoryChange(False, tuple(gone))
        new = (prompt_key, epoch)
        return HistoryChange(new not in gone, tuple(key for key in gone if key != new))

    def snapshot(self, prompt_key: str) -> PromptHistory | None:
        """Return a prompt's history, or None without any.

        It holds the newest epoch first, each in the order of its sample indices, and is cut to
        its first responses. Sample indices are exchangeable, so a cut epoch is a fair sample of it.
        """
        found: list[PastCompletion] = []
        for epoch in self.epochs_of(prompt_key):
            found.extend(self._prompts[prompt_key][epoch].completions(epoch))
            if len(found) >= self._responses:
                break
        if not found:
            return None
        return PromptHistory(prompt_key, found[0].epoch, tuple(found[: self._responses]))

    def _drop_oldest(self, prompt_key: str) -> tuple[str, int]:
        known = self._prompts[prompt_key]
        oldest = min(known)
        self._used -= known.pop(oldest).charge
        self._superseded.pop((prompt_key, oldest), None)
        if not known:
            del self._prompts[prompt_key]
        return prompt_key, oldest


def _pack(completions: Sequence[PastCompletion]) -> _Epoch:
    ordered = sorted(completions, key=lambda completion: completion.sample_index)
    rows = [np.asarray(completion.token_ids, dtype=np.int32) for completion in ordered]
    entry = _Epoch(
        tokens=np.concatenate(rows),
        offsets=np.cumsum([0, *(row.size for row in rows)], dtype=np.int64),
        versions=np.array([completion.version for completion in ordered], dtype=np.int64),
        sample_indices=np.array([completion.sample_index for completion in ordered], dtype=np.int32),
        rewards=np.array([completion.reward for completion in ordered], dtype=np.float64),
    )
    entry.tokens.flags.writeable = False
    return entry


def completion_weight(
    reward: float, mean: float, std: float, epochs_old: int, recency: float, reward_weight: float
) -> float:
    """Return how much a past completion counts when a draft chooses between branches.

    ``((1 - rho) + rho * sigmoid(A)) * recency ** epochs_old`` with the advantage
    ``A = (reward - mean) / std``, which is 0 where the rewards do not differ. The rule is
    RhymeRL's reward-aware branch choice (arXiv 2508.18588) with an exponential memory.

    >>> completion_weight(1.0, 0.5, 0.5, epochs_old=0, recency=0.7, reward_weight=0.0)
    1.0
    >>> round(completion_weight(1.0, 0.5, 0.5, epochs_old=1, recency=0.5, reward_weight=1.0), 4)
    0.3655

    Args:
        reward: the completion's own.
        mean: mean reward of its epoch.
        std: standard deviation of the rewards of its epoch.
        epochs_old: how many newer epochs of the prompt are known.
        recency: factor per epoch of age, in (0, 1].
        reward_weight: rho, in [0, 1].
    """
    advantage = (reward - mean) / std if std > 0.0 else 0.0
    if not math.isfinite(advantage):
        advantage = 0.0
    sigmoid = 0.5 * (1.0 + math.tanh(0.5 * advantage))
    preference = (1.0 - reward_weight) + reward_weight * sigmoid
    return max(_SMALLEST_WEIGHT, preference * recency**epochs_old)


def weighted(
    history: PromptHistory | None, recency: float, reward_weight: float
) -> list[tuple[IntArray, float]]:
    """Return ([T] int32 token ids, weight > 0) of each past completion that has tokens.

    Age counts the epochs that the history holds: a prompt that was evaluated every tenth
    version has epochs 0, 1, 2 ... steps old, not ten times as many.
    """
    if history is None:
        return []
    by_epoch: dict[int, list[float]] = {}
    for completion in history.completions:
        by_epoch.setdefault(completion.epoch, []).append(completion.reward)
    facts = {}
    for age, epoch in enumerate(sorted(by_epoch, reverse=True)):
        # A handful of numbers, for each request that comes: too few for numpy to be any quicker. Infinite or
        # NaN where the rewards are too large to be summed.
        rewards = by_epoch[epoch]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((reward - mean) * (reward - mean) for reward in rewards) / len(rewards))
        facts[epoch] = (mean, std, age)
    return [
        (past.token_ids, completion_weight(past.reward, *facts[past.epoch], recency, reward_weight))
        for past in history.completions
        if past.token_ids.size
    ]
