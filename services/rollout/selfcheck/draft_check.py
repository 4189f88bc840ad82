"""Draft check: before drafts are used, the engine shows that they change nothing.

Distribution: do tokens at drafted positions follow the engine's own, whatever was drafted?
Identity: are tokens and log-probabilities with right, half-right and senseless drafts those
without drafts? With the keyed sampler they must be; vLLM's own sampler uses its random stream up
differently when it verifies, so there the distribution alone decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from antiphon.api.engine import EngineOutput, EngineRequest
from antiphon.core.records import SamplingParameters
from antiphon.core.seeds import generator
from antiphon.services.rollout.engine.vllm_engine import VllmEngine
from antiphon.services.rollout.selfcheck.distribution_check import (
    LOGPROB_LIMIT,
    DistributionCheck,
    Float64Array,
    IntArray,
    PreferredFirst,
    descending,
    draw_seed,
    processed,
    run_to_end,
    sampling_cases,
    uniform_z,
)

DRAFTED = 192
"""Most answers of each way of sampling that are drawn with drafts; each has two tokens to test."""
WRONG_WINDOW = 8
"""Longest drafts that are not right from end to end: what follows the first wrong token is computed for
nothing, which takes seconds where a vocabulary is large."""
SAME_LOGPROB_LIMIT = {"float32": 1e-5, "float16": 0.02, "bfloat16": 0.15}
"""Largest difference of a log-probability with and without drafts, nats: rounding in other batch shapes."""
FLIPPED_SHARE = 0.5
"""Largest share of requests whose tokens rounding may change, where the precision is below float32."""


@dataclass(frozen=True, slots=True)
class IdentityCheck:
    """Drafted against undrafted answers to the same requests, under the keyed sampler."""

    requests: int
    flipped: int
    """Requests in which any token differed."""
    logprob_difference: float
    """Largest difference as long as tokens were the same, nats."""
    bits_equal: bool
    """Tokens and the bits of every log-probability were the same."""


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What drafts were seen to change in the engine in use."""

    distributions: tuple[DistributionCheck, ...]
    identity: IdentityCheck | None
    """None with vLLM's own sampler: its tokens depend on what was drafted, by design."""
    accepted: int
    """Drafted tokens that the engine accepted during the check."""
    dtype: str

    def why_not(self, bits: bool) -> str | None:
        """Say why drafts should stay off, or None if they may be used.

        Args:
            bits: the run's mode needs answers that are the same bit for bit.
        """
        worst = max(self.distributions, key=lambda check: (not check.holds, check.z))
        if not worst.holds:
            return f"tokens at drafted positions do not follow the engine's distribution ({worst.words})"
        if not self.accepted:
            return "the engine accepted none of the drafts it was handed, so it does not verify them"
        if self.identity is None:
            return "with sampling.sampler=native drafts change tokens; the mode forbids it" if bits else None
        check = self.identity
        allowed = 0 if self.dtype == "float32" else int(FLIPPED_SHARE * check.requests)
        if check.flipped > allowed:
            return f"drafts changed tokens in {check.flipped} of {check.requests} requests"
        if check.logprob_difference > SAME_LOGPROB_LIMIT[self.dtype]:
            return f"drafts changed log-probabilities by {check.logprob_difference:.2g} nats"
        if bits and not check.bits_equal:
            return "answers with drafts are not the same bit for bit, which loop.mode=fixed promises"
        return None


@dataclass(frozen=True, slots=True)
class _Known:
    """The engine's own distribution after a prefix."""

    logprobs: Float64Array
    """[V], nats."""
    order: IntArray
    """[V] tokens, the likeliest first."""


def run_draft_check(
    engine: VllmEngine,
    prompt: tuple[int, ...],
    firsts: Sequence[IntArray],
    requests: Sequence[EngineRequest],
    plain: Sequence[EngineOutput],
    seed: int,
) -> DraftReport:
    """Check an idle engine that drafts; call inside its rehearsal.

    Args:
        engine: `engine.drafts` must be true; nothing may be in flight.
        prompt: token ids the distribution is checked after.
        firsts: for each way of sampling, what the check's seeds draw after the prompt, [draws].
        requests: what the identity is checked on.
        plain: their answers without drafts.
        seed: seed of the check's own streams.
    """
    known = _known_distributions(engine, prompt)
    distributions, accepted = [], 0
    with engine.equal_rows_once():
        for case, drawn in zip(sampling_cases(engine.settings.dtype), firsts, strict=True):
            check, taken = _check_distribution(engine, prompt, case, known, drawn, seed)
            distributions.append(check)
            accepted += taken
    identity = None
    if engine.settings.sampler == "keyed":
        identity, taken = _check_identity(engine, requests, plain, seed)
        accepted += taken
    return DraftReport(tuple(distributions), identity, accepted, engine.settings.dtype)


def _known_distributions(engine: VllmEngine, prompt: tuple[int, ...]) -> dict[tuple[int, ...], _Known]:
    """Return the distributions after the likeliest beginnings of one and of two tokens."""

    def after(*prefix: int) -> _Known:
        logprobs = engine.distribution((*prompt, *prefix))
        return _Known(logprobs, descending(logprobs))

    start = after()
    known: dict[tuple[int, ...], _Known] = {(token,): after(token) for token in start.order[:8].tolist()}
    pairs = sorted(
        ((token, other) for (token, *_), one in known.items() for other in one.order[:4].tolist()),
        key=lambda pair: -(start.logprobs[pair[0]] + known[pair[:1]].logprobs[pair[1]]),
    )
    return {**known, **{pair: after(*pair) for pair in pairs[:8]}}


def _check_distribution(
    engine: VllmEngine,
    prompt: tuple[int, ...],
    case: SamplingParameters,
    known: dict[tuple[int, ...], _Known],
    firsts: IntArray,
    seed: int,
) -> tuple[DistributionCheck, int]:
    randomness = generator("self-test-draft-law", seed)
    sampling = replace(case, max_tokens=3)
    likeliest = {prefix: one.order[:3].tolist() for prefix, one in known.items()}
    after = {
        prefix: PreferredFirst(processed(one.logprobs, case, one.order), one.order)
        for prefix, one in known.items()
    }
    guesses: list[list[int]] = randomness.integers(engine.vocabulary_size, size=(len(firsts), 2)).tolist()

    def drafts(index: int, start: int) -> list[int]:
        # One third always the likeliest token, one third one of the three likeliest, the rest anything.
        # The second token of the chain stands for whatever follows a right first one.
        if index % 3 == 2 or (start,) not in known:
            return guesses[index]
        rank = 0 if index % 3 == 0 else index // 3 % 3
        second = likeliest[(start,)][rank]
        follows = likeliest.get((start, second))
        return [second, guesses[index][1] if follows is None else follows[0]]

    def script(request_id: str, so_far: list[int]) -> list[int]:
        return drafts(int(request_id.rpartition("-")[2]), so_far[0]) if len(so_far) == 1 else []

    # Of one that begins otherwise nothing is known.
    chosen = [index for index, token in enumerate(firsts.tolist()) if (token,) in known][:DRAFTED]
    requests = [EngineRequest(f"drafted-{i}", prompt, draw_seed(seed, i), sampling) for i in chosen]
    with engine.scripted_drafts(script):
        outputs = run_to_end(engine, requests)
    points, impossible, error = [], 0, 0.0
    within = randomness.random((len(firsts), 2))
    for index, output in zip(chosen, outputs, strict=True):
        tokens = output.token_ids.tolist()
        for at in range(1, len(tokens)):
            exact = after.get(tuple(tokens[:at]))
            if exact is None:
                break
            p = float(exact.probabilities[tokens[at]])
            if p == 0.0:
                impossible += 1
                break
            error = max(error, abs(float(output.logprobs[at]) - float(np.log(p))))
            if exact.probabilities.max() < 0.999:
                preferred = drafts(index, tokens[0])[at - 1]
                points.append(exact.point(tokens[at], preferred, float(within[index, at - 1])))
    z, degrees = uniform_z(np.array(points))
    limit = LOGPROB_LIMIT[engine.settings.dtype]
    check = DistributionCheck(case, len(points), degrees, z, impossible, error, limit)
    return check, _accepted(outputs)


def _check_identity(
    engine: VllmEngine, requests: Sequence[EngineRequest], plain: Sequence[EngineOutput], seed: int
) -> tuple[IdentityCheck, int]:
    randomness = generator("self-test-draft-identity", seed)
    window, vocabulary = engine.settings.draft_tokens, engine.vocabulary_size
    texts, places = {}, {}
    for index, output in enumerate(plain):
        right = output.token_ids.astype(np.int64)
        noise = randomness.integers(vocabulary, size=len(right) + window)
        wrong = randomness.random(len(right)) < (0.0, 0.3, 1.0)[index % 3]
        texts[output.request_id] = [*np.where(wrong, noise[: len(right)], right).tolist(), *noise.tolist()]
        places[output.request_id] = index

    def script(request_id: str, so_far: list[int]) -> list[int]:
        begin, index = len(so_far), places[request_id]
        if index % 3 == 2 and begin % 2:  # senseless drafts are computed for nothing: at every other place
            return []
        longest = min(WRONG_WINDOW, window) if index % 3 else window
        return texts[request_id][begin : begin + 1 + index % longest]

    with engine.scripted_drafts(script):
        drafted = run_to_end(engine, requests)
        chosen = range(0, len(requests), max(1, len(requests) // 2))
        drafted += [run_to_end(engine, [requests[index]])[0] for index in chosen]
    return compare([*plain, *(plain[index] for index in chosen)], drafted), _accepted(drafted)


def compare(plain: Sequence[EngineOutput], drafted: Sequence[EngineOutput]) -> IdentityCheck:
    """Compare answers to the same requests, in the same order."""
    flipped, difference, bits = 0, 0.0, True
    for want, got in zip(plain, drafted, strict=True):
        common = min(len(want.token_ids), len(got.token_ids))
        unequal = np.flatnonzero(want.token_ids[:common] != got.token_ids[:common])
        same = int(unequal[0]) if len(unequal) else common
        flipped += not np.array_equal(want.token_ids, got.token_ids)
        gap = np.abs(want.logprobs[:same].astype(np.float64) - got.logprobs[:same])
        difference = max(difference, float(gap.max(initial=0.0)))
        bits &= want.logprobs.tobytes() == got.logprobs.tobytes()
    return IdentityCheck(len(plain), flipped, difference, bits and not flipped)


def _accepted(outputs: Sequence[EngineOutput]) -> int:
    return sum(output.drafting.accepted for output in outputs if output.drafting is not None)
