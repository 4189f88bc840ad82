"""Startup check: before a worker serves, its engine shows that it draws from its own distribution.

Three questions are put to the engine in use, on whatever weights it holds. Distribution: do sampled
tokens follow the one that the engine itself computes for the prompt (its prompt scoring, in which the
sampler has no part), and are their log-probabilities those of it? Bits: are tokens and log-probabilities
of a request the same alone and in a full batch, and when it is continued from tokens that another engine
sampled, and is a row of a matrix product the same beside any number of others? Drafts: do they change
anything? Fixed mode needs the first two, elastic mode the first; drafts, and in fixed mode the groups of lost
workers, are used only where they are seen to change nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from antiphon.api.engine import EngineOutput, EngineRequest
from antiphon.core.records import SamplingParameters
from antiphon.core.seeds import derive_seed, generator
from antiphon.services.rollout.engine.vllm_engine import VllmEngine
from antiphon.services.rollout.selfcheck.distribution_check import (
    LOGPROB_LIMIT,
    DistributionCheck,
    Float64Array,
    IntArray,
    descending,
    draw_seed,
    law_z,
    processed,
    run_to_end,
    sampling_cases,
)
from antiphon.services.rollout.selfcheck.draft_check import DraftReport, compare, run_draft_check

MIXED = (
    SamplingParameters(temperature=1.0),
    SamplingParameters(temperature=0.7),
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=1.0, top_k=8, top_p=0.9),
)
"""Ways of sampling that share a batch in the checks of bits and of drafts."""
LONG_PROMPT = 1024
"""Tokens of the longest prompts of these checks: attention cuts a long context by the shape of the batch."""
RESULTS, NARROW_RESULTS = 1 << 14, 1 << 20
"""Results of each product that are compared, in float32 and below. Of those that another order of adding
changes in float32, one in tens of thousands changes in 16 bits: few answers would show it."""
ROWS = (1, 4, 5, 16)
"""Rows that are multiplied at once, against all of them."""


@dataclass(frozen=True, slots=True)
class StartupReport:
    """What the engine in use was seen to do."""

    distributions: tuple[DistributionCheck, ...]
    bits_equal: bool
    """A request had the same tokens, and the same bits of log-probabilities, alone and in a full batch."""
    logprob_difference: float
    """Largest difference as long as tokens were the same, nats."""
    continues: bool
    """So they were when the request was continued from the middle of its completion."""
    drafts: DraftReport | None
    """None for an engine that does not draft."""
    uneven_share: float = 0.0
    """Largest share of a matrix product's results that the number of its rows changed."""
    keeps_prefixes: bool = True
    """What was sampled over the kept cache of earlier turns had the same bits as without it."""

    @property
    def distributions_hold(self) -> bool:
        """Return whether undrafted tokens follow the policy's distribution."""
        return all(check.holds for check in self.distributions)

    def drafts_hold(self, bits: bool) -> bool:
        """Return whether drafts may be used; `bits` asks for answers that are equal bit for bit."""
        return self.drafts is not None and self.drafts.why_not(bits) is None


def run_startup_check(
    engine: VllmEngine, prompt: Sequence[int] | None = None, draws: int = 768, seed: int = 0
) -> StartupReport:
    """Check distribution, bits and drafts on an idle engine.

    That takes about two seconds for a small model, and twelve at a vocabulary of 151,936.

    Args:
        engine: nothing may be in flight. Drafts are left on or off as they were.
        prompt: token ids the distribution is checked at; by default the one of 8 random prompts after
            which the engine's distribution is widest, so that the check can tell distributions apart.
        draws: tokens sampled for each way of sampling.
        seed: seed of the check's own streams.
    """
    drafting = engine.drafts
    with engine.rehearsal():
        start = tuple(prompt) if prompt is not None else _widest_prompt(engine, seed)
        engine.use_drafts(False)
        cases, logprobs = sampling_cases(engine.settings.dtype), engine.distribution(start)
        order = descending(logprobs)
        with engine.equal_rows_once():
            found = [_check_distribution(engine, start, one, logprobs, order, draws, seed) for one in cases]
        requests = _mixed_requests(engine, seed)
        chosen = requests[:: max(1, len(requests) // 4)]
        alone = [run_to_end(engine, [request])[0] for request in chosen]
        everyone = {output.request_id: output for output in run_to_end(engine, requests)}
        engine.use_drafts(drafting)
        bits = compare(alone, [everyone[request.request_id] for request in chosen])
        continued = compare(alone, _continued(engine, chosen, alone))
        plain = [everyone[request.request_id] for request in requests]
        firsts = [tokens[: draws // 2] for _, tokens in found]
        drafts = run_draft_check(engine, start, firsts, requests, plain, seed) if drafting else None
        dtype = getattr(torch, engine.settings.dtype)
        keeps = _keeps_prefixes(engine, chosen) if engine.settings.prefix_caching else True
        uneven = max((uneven_share(*one, dtype, seed) for one in engine.products()), default=0.0)
    return StartupReport(
        distributions=tuple(check for check, _ in found),
        bits_equal=bits.bits_equal and not uneven,
        logprob_difference=bits.logprob_difference,
        continues=continued.bits_equal,
        drafts=drafts,
        uneven_share=uneven,
        keeps_prefixes=keeps,
    )


def uneven_share(
    width: int, product: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, seed: int
) -> float:
    """Return the largest share of a product's results, [R, width] -> [R, N], that other R changed."""
    results = RESULTS if dtype == torch.float32 else NARROW_RESULTS
    count = max(2 * max(ROWS) + 1, results // product(torch.zeros((1, width), dtype=dtype)).shape[-1])
    drawn = generator("self-test-products", seed).standard_normal((count, width), dtype=np.float32)
    rows = torch.from_numpy(drawn).to(dtype)
    whole = product(rows)

    def changed(size: int) -> int:
        pairs = zip(rows.split(size), whole.split(size), strict=True)
        return sum(int(torch.count_nonzero(product(part) != same)) for part, same in pairs)

    return float(max(map(changed, ROWS)) / whole.numel())


def _continued(
    engine: VllmEngine, requests: Sequence[EngineRequest], whole: Sequence[EngineOutput]
) -> list[EngineOutput]:
    """Sample the second half of each completion again, all at once, and return it behind the first half."""
    halves = [len(output.token_ids) // 2 for output in whole]
    begun = [
        replace(request, prefix_token_ids=tuple(output.token_ids[:half].tolist()))
        for request, output, half in zip(requests, whole, halves, strict=True)
    ]
    return [
        replace(
            output,
            token_ids=np.concatenate([output.token_ids[:half], rest.token_ids]),
            logprobs=np.concatenate([output.logprobs[:half], rest.logprobs]),
        )
        for output, rest, half in zip(whole, run_to_end(engine, begun), halves, strict=True)
    ]


def _keeps_prefixes(engine: VllmEngine, requests: Sequence[EngineRequest]) -> bool:
    """Return whether completions that go on over the cache of their own tokens end as they do without it.

    They are so long that what was kept begins with a block which was filled token by token.
    """
    longest, most = 3 * engine.settings.block_size, engine.settings.max_model_len
    rooms = [min(longest, most - len(request.prompt_token_ids)) for request in requests]
    longer = [
        replace(request, sampling=replace(request.sampling, max_tokens=room))
        for request, room in zip(requests, rooms, strict=True)
    ]
    whole = run_to_end(engine, longer)
    kept = _continued(engine, longer, whole)
    engine.drop_prefixes()
    computed = _continued(engine, longer, whole)
    return compare(whole, kept).bits_equal and compare(kept, computed).bits_equal


def _widest_prompt(engine: VllmEngine, seed: int) -> tuple[int, ...]:
    randomness = generator("self-test-prompts", seed)
    # Thousands of requests take it in.
    prompts = [tuple(row) for row in randomness.integers(engine.vocabulary_size, size=(8, 2)).tolist()]

    def entropy(prompt: tuple[int, ...]) -> float:
        logprobs = engine.distribution(prompt)
        return -float((np.exp(logprobs) * np.maximum(logprobs, -1e9)).sum())

    return max(prompts, key=entropy)


def _check_distribution(
    engine: VllmEngine,
    prompt: tuple[int, ...],
    sampling: SamplingParameters,
    logprobs: Float64Array,
    order: IntArray,
    draws: int,
    seed: int,
) -> tuple[DistributionCheck, IntArray]:
    """Return what was seen, and the tokens [draws] that were sampled with the seeds of the check."""
    requests = [EngineRequest(f"drawn-{i}", prompt, draw_seed(seed, i), sampling) for i in range(draws)]
    outputs = run_to_end(engine, requests)
    tokens = np.array([output.token_ids[0] for output in outputs])
    reported = np.array([output.logprobs[0] for output in outputs], dtype=np.float64)
    p = processed(logprobs, sampling, order)
    drawn = p[tokens]
    possible = drawn > 0
    within = generator("self-test-within", seed).random(draws)
    z, degrees = law_z(tokens[possible], p, within[possible])
    check = DistributionCheck(
        sampling=sampling,
        draws=draws,
        degrees=degrees,
        z=z,
        impossible=int((~possible).sum()),
        logprob_error=float(np.abs(reported[possible] - np.log(drawn[possible])).max(initial=0.0)),
        logprob_limit=LOGPROB_LIMIT[engine.settings.dtype],
    )
    return check, tokens


def _mixed_requests(engine: VllmEngine, seed: int) -> list[EngineRequest]:
    # Long and short prompts side by side: kernels split their work by the shape of the batch.
    settings = engine.settings
    tokens = min(12, settings.max_model_len // 2)
    longest = min(96, settings.max_model_len - tokens)
    randomness = generator("self-test-bits", seed)
    lengths = [1 + i * 37 % longest for i in range(min(64, settings.max_num_seqs))]
    for i in range(0, len(lengths), max(1, len(lengths) // 2)):  # among those that are sampled alone, too
        lengths[i] = min(LONG_PROMPT, settings.max_model_len - tokens)
    return [
        EngineRequest(
            f"bits-{i}",
            tuple(int(t) for t in randomness.integers(engine.vocabulary_size, size=length)),
            derive_seed("self-test-bits", seed, i),
            replace(MIXED[i % len(MIXED)], max_tokens=tokens),
        )
        for i, length in enumerate(lengths)
    ]
