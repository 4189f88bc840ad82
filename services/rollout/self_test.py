"""Self-test: before a worker serves, its engine shows that it draws from its own distribution.

Two questions are put to the engine in use, on whatever weights it holds. Law: do sampled tokens
follow the distribution that the engine itself computes for the prompt (its prompt scoring, in
which the sampler has no part)? Bits: are tokens and log-probabilities of a request the same alone
and in a full batch? Fixed mode needs both; elastic mode needs the law.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from antiphon.core.records import SamplingParameters
from antiphon.core.seeds import derive_seed, generator
from antiphon.services.rollout.engine import EngineOutput, EngineRequest
from antiphon.services.rollout.vllm_engine import VllmEngine

Float64Array = npt.NDArray[np.float64]

Z_LIMIT = 6.0
"""A sound sampler exceeds it about once in 10^8 tests."""

LAW_CASES = (
    SamplingParameters(temperature=1.0, max_tokens=1),
    SamplingParameters(temperature=0.7, max_tokens=1),
    SamplingParameters(temperature=1.0, top_k=8, top_p=0.9, max_tokens=1),
)


@dataclass(frozen=True, slots=True)
class LawCheck:
    """Sampled tokens against the exact distribution, for one way of sampling."""

    sampling: SamplingParameters
    draws: int
    degrees: int
    """Degrees of freedom of the test; 0 where the policy left nothing to chance."""
    z: float
    """Chi-square statistic in standard deviations from its mean; large means another law."""
    impossible: int
    """Sampled tokens that the distribution rules out."""
    logprob_error: float
    """Largest difference between reported and exact log-probability, nats."""

    @property
    def holds(self) -> bool:
        """Tell whether the sampler can be trusted."""
        return self.z < Z_LIMIT and self.impossible == 0


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """What the engine in use was seen to do."""

    sampler: str
    law: tuple[LawCheck, ...]
    tokens_equal: bool
    """Tokens of a request were the same alone and in a full batch."""
    bits_equal: bool
    """So were the bits of its log-probabilities."""
    logprob_difference: float
    """Largest difference where tokens were the same, nats."""

    @property
    def law_holds(self) -> bool:
        """Tell whether tokens follow the policy's distribution."""
        return all(check.holds for check in self.law)


def run_self_test(
    engine: VllmEngine, prompt: Sequence[int] | None = None, draws: int = 1024, seed: int = 0
) -> SelfTestReport:
    """Test law and bits on an idle engine; takes a second or two for a small model.

    Args:
        engine: nothing may be in flight.
        prompt: token ids the law is tested at; by default the one of 16 random prompts after
            which the engine's distribution is widest, so that the test can tell laws apart.
        draws: tokens sampled for each way of sampling.
        seed: seed of the test's own streams.
    """
    with engine.rehearsal():
        start = tuple(prompt) if prompt is not None else _widest_prompt(engine, seed)
        logprobs = engine.distribution(start)
        law = tuple(_check_law(engine, start, case, logprobs, draws, seed) for case in LAW_CASES)
        alone, together = _alone_and_together(engine, seed)
    same = [np.array_equal(a.token_ids, b.token_ids) for a, b in zip(alone, together, strict=True)]
    pairs = [(a.logprobs, b.logprobs) for a, b, s in zip(alone, together, same, strict=True) if s]
    return SelfTestReport(
        sampler=engine.sampler,
        law=law,
        tokens_equal=all(same),
        bits_equal=all(same) and all(a.tobytes() == b.tobytes() for a, b in pairs),
        logprob_difference=max((float(np.abs(a - b).max()) for a, b in pairs), default=0.0),
    )


def processed(logprobs: Float64Array, sampling: SamplingParameters) -> Float64Array:
    """Return the probabilities [V] left by temperature, top-k and top-p; written apart from the sampler."""
    scaled = logprobs / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")[: sampling.top_k or len(p)]
    mass = np.cumsum(p[order]) / p[order].sum()
    order = order[: int(np.searchsorted(mass, sampling.top_p)) + 1] if sampling.top_p < 1.0 else order
    kept: Float64Array = np.zeros_like(p)
    kept[order] = p[order] / p[order].sum()
    return kept


def chi_square_z(counts: Float64Array, probabilities: Float64Array) -> tuple[float, int]:
    """Return how far counts [V] lie from n * probabilities, and the degrees of freedom.

    The distance is in standard deviations of the chi-square statistic.

    Tokens expected fewer than five times are counted as one.
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
    return float((((seen - wanted) ** 2 / wanted).sum() - degrees) / np.sqrt(2 * degrees)), degrees


def _widest_prompt(engine: VllmEngine, seed: int) -> tuple[int, ...]:
    chance = generator("self-test-prompts", seed)
    length = min(8, engine.settings.max_model_len // 2)
    prompts = [tuple(int(t) for t in chance.integers(engine.vocabulary_size, size=length)) for _ in range(16)]

    def entropy(prompt: tuple[int, ...]) -> float:
        logprobs = engine.distribution(prompt)
        return -float((np.exp(logprobs) * np.maximum(logprobs, -1e9)).sum())

    return max(prompts, key=entropy)


def _check_law(
    engine: VllmEngine,
    prompt: tuple[int, ...],
    sampling: SamplingParameters,
    logprobs: Float64Array,
    draws: int,
    seed: int,
) -> LawCheck:
    outputs = _sample(
        engine,
        [
            EngineRequest(f"law-{i}", prompt, derive_seed("self-test", seed, i), sampling)
            for i in range(draws)
        ],
    )
    tokens = np.array([output.token_ids[0] for output in outputs])
    reported = np.array([output.logprobs[0] for output in outputs], dtype=np.float64)
    p = processed(logprobs, sampling)
    drawn = p[tokens]
    possible = drawn > 0
    z, degrees = chi_square_z(np.bincount(tokens, minlength=len(p)).astype(np.float64), p)
    return LawCheck(
        sampling=sampling,
        draws=draws,
        degrees=degrees,
        z=z,
        impossible=int((~possible).sum()),
        logprob_error=float(np.abs(reported[possible] - np.log(drawn[possible])).max(initial=0.0)),
    )


def _alone_and_together(engine: VllmEngine, seed: int) -> tuple[list[EngineOutput], list[EngineOutput]]:
    # Long and short prompts side by side: kernels split their work by the shape of the batch.
    settings = engine.settings
    tokens = min(32, settings.max_model_len // 2)
    longest = min(96, settings.max_model_len - tokens)
    sampling = SamplingParameters(max_tokens=tokens)
    chance = generator("self-test-bits", seed)
    requests = [
        EngineRequest(
            f"bits-{i}",
            tuple(int(t) for t in chance.integers(engine.vocabulary_size, size=1 + i * 37 % longest)),
            derive_seed("self-test-bits", seed, i),
            sampling,
        )
        for i in range(min(64, settings.max_num_seqs))
    ]
    chosen = requests[:: max(1, len(requests) // 12)]
    alone = [_sample(engine, [request])[0] for request in chosen]
    everyone = {output.request_id: output for output in _sample(engine, requests)}
    return alone, [everyone[request.request_id] for request in chosen]


def _sample(engine: VllmEngine, requests: list[EngineRequest]) -> list[EngineOutput]:
    engine.add(requests)
    outputs: list[EngineOutput] = []
    while engine.unfinished:
        outputs += engine.step()
    return outputs
