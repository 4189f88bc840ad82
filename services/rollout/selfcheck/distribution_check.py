"""Distribution check: do sampled tokens follow a distribution that is known exactly?

Tokens drawn from one distribution are counted where they are common, and all of them, however rare, are
carried to the unit interval, where they must be uniform: the randomised probability integral transform
(Rosenblatt 1952; Czado, Gneiting and Held 2009 for discrete numbers). So the test has power at any
vocabulary. Tokens drawn from many different distributions are carried there, too.

Legend: V vocabulary, N draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from antiphon.api.engine import Engine, EngineOutput, EngineRequest
from antiphon.core.records import SamplingParameters
from antiphon.core.seeds import derive_seed

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

Z_LIMIT = 6.0
"""A sound sampler exceeds it about once in 10^9 tests."""

LOGPROB_LIMIT = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""Largest difference of a reported log-probability from the engine's own scoring, nats, by the precision of
the engine. Rounding in other batch shapes stays below; a wrong temperature or mask does not."""

_WHOLE = (
    SamplingParameters(temperature=1.0, max_tokens=1),
    SamplingParameters(temperature=0.7, max_tokens=1),
)
_CUT = SamplingParameters(temperature=1.0, top_k=8, top_p=0.9, max_tokens=1)


def sampling_cases(dtype: str) -> tuple[SamplingParameters, ...]:
    """Return the ways of sampling that are checked in an engine of this precision.

    Below float32 rounding moves the edge of a cut set from pass to pass, so that an honest engine's set is
    another one than its scoring's; only evaluation samples from cut sets.
    """
    return (*_WHOLE, _CUT) if dtype == "float32" else _WHOLE


@dataclass(frozen=True, slots=True)
class DistributionCheck:
    """Sampled tokens against the exact distribution, for one way of sampling."""

    sampling: SamplingParameters
    draws: int
    degrees: int
    """Degrees of freedom of the test that `z` is of; 0 where there was nothing to test."""
    z: float
    """Largest chi-square statistic as a standard normal number; large means another distribution."""
    impossible: int
    """Sampled tokens that the distribution rules out."""
    logprob_error: float
    """Largest difference between reported and exact log-probability, nats."""
    logprob_limit: float = LOGPROB_LIMIT["float32"]
    """What rounding may explain of that, nats."""

    @property
    def holds(self) -> bool:
        """Return whether the sampler can be trusted."""
        return self.z < Z_LIMIT and self.impossible == 0 and self.logprob_error <= self.logprob_limit

    @property
    def words(self) -> str:
        """Return what was seen, for a sentence."""
        return (
            f"{self.sampling}: z={self.z:.1f}, {self.impossible} impossible tokens, log-probabilities off by "
            f"{self.logprob_error:.2g} nats"
        )


def draw_seed(seed: int, index: int) -> int:
    """Return the seed of one of the check's draws; drafted or not, its first token is the same."""
    return derive_seed("self-test", seed, index)


def run_to_end(engine: Engine, requests: Sequence[EngineRequest]) -> list[EngineOutput]:
    """Sample requests on an idle engine; outputs in the order of the requests."""
    engine.add(requests)
    outputs: dict[str, EngineOutput] = {}
    while engine.unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    return [outputs[request.request_id] for request in requests]


def descending(values: Float64Array) -> IntArray:
    """Return the places [V] of numbers, the largest first."""
    order: IntArray = np.argsort(-values, kind="stable")
    return order


def processed(
    logprobs: Float64Array, sampling: SamplingParameters, order: IntArray | None = None
) -> Float64Array:
    """Return the probabilities [V] left by temperature, top-k and top-p; written apart from the sampler.

    `order` is that of the log-probabilities, for who knows it: it takes longer than all the rest.
    """
    scaled = logprobs / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = (descending(p) if order is None else order)[: sampling.top_k or len(p)]
    mass = np.cumsum(p[order]) / p[order].sum()
    order = order[: int(np.searchsorted(mass, sampling.top_p)) + 1] if sampling.top_p < 1.0 else order
    kept: Float64Array = np.zeros_like(p)
    kept[order] = p[order] / p[order].sum()
    return kept


def chi_square_z(counts: Float64Array, probabilities: Float64Array) -> tuple[float, int]:
    """Return how far counts [V] lie from n * probabilities, and the degrees of freedom.

    The chi-square statistic is carried to a standard normal number by the cube root of Wilson and
    Hilferty (1931), so that one limit serves few degrees of freedom and many. Tokens expected
    fewer than five times are counted as one.
    """
    expected = probabilities * counts.sum()
    common = expected >= 5
    seen = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    if wanted[-1] < 1:
        seen, wanted = seen[:-1], wanted[:-1]
    degrees = len(seen) - 1
    if degrees < 1:
        return 0.0, 0
    ratio = float(((seen - wanted) ** 2 / wanted).sum()) / degrees
    spread = 2 / (9 * degrees)
    return (ratio ** (1 / 3) - (1 - spread)) / spread**0.5, degrees


def law_z(tokens: IntArray, probabilities: Float64Array, within: Float64Array) -> tuple[float, int]:
    """Return how far drawn tokens lie from a distribution, as `chi_square_z` does: the worst of four tests.

    Common tokens are counted one by one. All tokens are carried to the unit interval with the vocabulary in
    three orders, since a fault that spares every other token of an order cannot be seen in that one: by id,
    by the id's lowest bits first, and by probability. A sound sampler fails one of the four with a
    probability of about 4e-9. What spares tokens without regard to id and probability can only be seen
    among tokens that are drawn more than once.

    Args:
        tokens: [N] drawn independently; all of them possible.
        probabilities: [V] float64.
        within: [N] uniform numbers in [0, 1), independent of the draws.
    """
    p = probabilities
    found = [chi_square_z(np.bincount(tokens, minlength=len(p)).astype(np.float64), p)]
    ids = np.arange(len(p))
    for order in (ids, np.argsort(_bits_reversed(ids), kind="stable"), descending(p)):
        below = np.empty_like(p)
        below[order] = np.cumsum(p[order]) - p[order]
        found.append(uniform_z(below[tokens] + within * p[tokens]))
    return max((seen for seen in found if seen[1]), default=(0.0, 0))


def _bits_reversed(ids: IntArray) -> IntArray:
    width = max(1, int(ids[-1]).bit_length())
    reversed_ids: IntArray = np.zeros_like(ids)
    for bit in range(width):
        reversed_ids |= ((ids >> bit) & 1) << (width - 1 - bit)
    return reversed_ids


class PreferredFirst:
    """One distribution [V], laid on the unit interval with a token of one's choice first."""

    def __init__(self, probabilities: Float64Array, order: IntArray | None = None) -> None:
        """Order the tokens by probability, the largest first; `order` is that, for who knows it."""
        order = descending(probabilities) if order is None else order
        below = np.cumsum(probabilities[order]) - probabilities[order]
        self.probabilities = probabilities
        self._below = np.empty_like(below)
        self._below[order] = below

    def point(self, token: int, preferred: int, within: float) -> float:
        """Return where a drawn token lies: uniform in [0, 1) if it was drawn from this distribution.

        The randomised probability integral transform; the preferred token fills the beginning, so
        that too many and too few of it are seen at once.

        Args:
            token: what was drawn; must be possible.
            preferred: any token that was chosen without knowing the drawn one.
            within: a uniform number in [0, 1), independent of the draw.
        """
        p = self.probabilities
        if token == preferred:
            return float(within * p[token])
        moved = p[preferred] if self._below[preferred] > self._below[token] else 0.0
        return float(self._below[token] + moved + within * p[token])


def uniform_z(points: Float64Array) -> tuple[float, int]:
    """Return how far [N] numbers are from uniform in [0, 1), as `chi_square_z` does."""
    bins = min(16, len(points) // 16)
    if bins < 2:
        return 0.0, 0
    counts = np.bincount(np.minimum((points * bins).astype(np.int64), bins - 1), minlength=bins)
    return chi_square_z(counts.astype(np.float64), np.full(bins, 1 / bins))
