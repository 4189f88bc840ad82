"""Dishonest workers: one honest worker and those that are not, with a small real model and the real sampler.

Each makes the trajectories of one group from a lease. They sample step by step with a key-value
cache, as an engine does, so that an auditor's single forward pass differs from them by rounding.

Legend: G samples of a group, T tokens of a completion, V vocabulary.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antiphon.core.config import RunConfig
from antiphon.core.records import (
    FinishReason,
    FloatArray,
    IntArray,
    Lease,
    SamplingParameters,
    Trajectory,
    VersionSpan,
)
from antiphon.core.seeds import derive_seed, request_seeds
from antiphon.core.trust.audit import AuthoredSpan
from antiphon.models.codec import TextCodec
from antiphon.models.rendering import Renderer
from antiphon.sampling.keyed_sampler import Float64Array, RowSampling, draw, request_key, score, uniforms
from antiphon.sampling.rules import RULES
from antiphon.services.learner.policy import load_causal_model
from antiphon.services.learner.scoring import row_sampling

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "examples" / "models" / "chain-sum"
MAX_TOKENS = 64
GROUP = 8

Group = tuple[Trajectory, ...]
Choose = Callable[[int, torch.Tensor, torch.Tensor, Float64Array, RowSampling], torch.Tensor]
"""Returns tokens [R] from a place in the completion, logits [R, V], the drawn tokens [R], and the uniforms
[R] and the sampling that drew them."""
Make = Callable[[Sequence[Lease]], list[Group]]
"""What a worker does with some leases at once."""


@dataclass(frozen=True, slots=True, eq=False)
class TinySampler:
    """The policy everybody is asked to sample with, and what is known of it."""

    model: Any
    end_token: int
    vocabulary: int
    rule: str = "inverse_cdf"
    """How keyed random numbers choose a token."""


def load_sampler(dtype: torch.dtype = torch.float32, rule: str = "inverse_cdf") -> TinySampler:
    """Load the small model that is shipped."""
    codec = TextCodec.load(str(MODEL))
    return TinySampler(
        load_causal_model(str(MODEL), dtype, False).eval(), codec.end_token_id, codec.vocabulary_size, rule
    )


def trust_config(dtype: str = "float32") -> RunConfig:
    """Return the configuration of a run with that model."""
    return RunConfig.model_validate(
        {
            "model": {"path": str(MODEL), "dtype": dtype},
            "sampling": {"max_tokens": MAX_TOKENS},
            "loop": {"group_size": GROUP},
        }
    )


def trust_leases(count: int, first: int = 0, samples: int = GROUP) -> list[Lease]:
    """Return leases as a coordinator grants them; their prompts have equally many tokens."""
    renderer = Renderer.load(trust_config())
    leases = []
    for number in range(first, first + count):
        text = f"{1 + number % 9} + {number // 9 % 8 + 1} - {number % 7 + 1} + {number // 7 % 6 + 2} ="
        key = f"train-0-{number}"
        leases.append(
            Lease(
                lease_id=f"{number:032x}",
                group_id=f"g{number:07d}",
                prompt_key=key,
                prompt_token_ids=renderer.encode_prompt(text),
                epoch=0,
                seeds=request_seeds(0, key, 0, samples),
                sampling=SamplingParameters(max_tokens=MAX_TOKENS),
                version=None,
                duration_s=30.0,
                attempt=1,
            )
        )
    return leases


def sample(
    sampler: TinySampler,
    model: Any,
    leases: Sequence[Lease],
    seeds: Sequence[Sequence[int]] | None = None,
    temperature: float | None = None,
    choose: Choose | None = None,
) -> list[Group]:
    """Sample the groups of some leases together, as an engine does: a token at a time, with a cache.

    Args:
        sampler: whose tokens they are.
        model: weights to sample with.
        leases: with prompts of the same length and the same sampling parameters.
        seeds: other seeds than the leases', a row for each lease.
        temperature: another one than the leases'.
        choose: takes other tokens than those that were drawn; their honest logprobs are reported.
    """
    from transformers import DynamicCache

    wanted = [lease.seeds for lease in leases] if seeds is None else seeds
    flat = [seed for row in wanted for seed in row]
    prompts = [lease.prompt_token_ids for lease, row in zip(leases, wanted, strict=True) for _ in row]
    sampling, start = leases[0].sampling, len(prompts[0])
    if temperature is not None:
        sampling = dataclasses.replace(sampling, temperature=temperature)
    count, longest, cache = len(flat), sampling.max_tokens, DynamicCache()
    keys = np.array([request_key(seed) for seed in flat], dtype=np.uint64)
    rows = row_sampling(sampling, count, sampler.vocabulary)
    tokens = np.zeros((count, longest), dtype=np.int32)
    logprobs = np.zeros((count, longest), dtype=np.float32)
    lengths = np.full(count, longest)
    inputs = torch.tensor(prompts)
    with torch.no_grad():
        for place in range(longest):
            logits = model(input_ids=inputs, past_key_values=cache, use_cache=True).logits[:, -1].float()
            at = np.full(count, start + place, dtype=np.int64)
            drawn, found = RULES[sampler.rule].draw(logits, keys, at, rows)
            if choose is not None:
                drawn = choose(place, logits, drawn, uniforms(keys, at), rows)
                found = score(logits, drawn, rows)
            tokens[:, place], logprobs[:, place] = drawn.numpy(), np.minimum(found.numpy(), 0.0)
            lengths[(tokens[:, place] == sampler.end_token) & (lengths == longest)] = place + 1
            if (lengths <= place + 1).all():
                break
            inputs = drawn.unsqueeze(-1)
    rest = iter(range(count))
    return [
        tuple(
            _trajectory(sampler, index, seed, tokens[row, : lengths[row]], logprobs[row, : lengths[row]])
            for index, (seed, row) in enumerate(zip(lease.seeds, rest))  # noqa: B905 - the rows go on
        )
        for lease in leases
    ]


def _trajectory(
    sampler: TinySampler, index: int, seed: int, tokens: IntArray, logprobs: FloatArray
) -> Trajectory:
    stopped = int(tokens[-1]) == sampler.end_token
    return Trajectory(
        sample_index=index,
        seed=seed,
        token_ids=tokens.copy(),
        logprobs=logprobs.copy(),
        spans=(VersionSpan(0, 0, tokens.size),),
        finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
    )


def quantised(model: Any, bits: int) -> Any:
    """Return a copy with every matrix rounded to `bits` bits, row by row."""
    found = copy.deepcopy(model)
    most = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for weight in found.parameters():
            if weight.ndim == 2:
                scale = weight.abs().amax(-1, keepdim=True).clamp_min(1e-12) / most
                weight.copy_((weight / scale).round().clamp(-most - 1, most) * scale)
    return found


def stepped(sampler: TinySampler, lease: Lease, learning_rate: float) -> Any:
    """Return a copy that is one optimizer step away: each weight moved by the rate, down a gradient.

    That is what AdamW's first step does; the gradient is of the model's own completions.
    """
    found = copy.deepcopy(sampler.model)
    start = len(lease.prompt_token_ids)
    for trajectory in sample(sampler, sampler.model, [lease])[0]:
        whole = torch.tensor([[*lease.prompt_token_ids, *trajectory.token_ids.tolist()]])
        logits = found(input_ids=whole[:, :-1]).logits[0, start - 1 :].float()
        torch.nn.functional.cross_entropy(logits, whole[0, start:]).backward()
    with torch.no_grad():
        for weight in found.parameters():
            if weight.grad is not None:
                weight -= learning_rate * weight.grad.sign()
                weight.grad = None
    return found


def disturbed(model: Any, share: float, seed: int) -> Any:
    """Return another model: every matrix has noise of `share` of its own size."""
    generator = torch.Generator().manual_seed(seed)
    found = copy.deepcopy(model)
    with torch.no_grad():
        for weight in found.parameters():
            if weight.ndim == 2:
                weight += share * weight.std() * torch.randn(weight.shape, generator=generator)
    return found


def honest(sampler: TinySampler, model: Any = None) -> Make:
    """Sample as leased, with `model` instead of the right one if it is given."""
    return lambda leases: sample(sampler, sampler.model if model is None else model, leases)


def wrong_temperature(sampler: TinySampler, temperature: float) -> Make:
    """Sample at another temperature and report the logprobs of that."""
    return lambda leases: sample(sampler, sampler.model, leases, temperature=temperature)


def wrong_tokens(sampler: TinySampler, share: float, seed: int) -> Make:
    """Replace a share of the tokens by others of the vocabulary."""
    rng = np.random.default_rng(seed)
    choices = [token for token in range(3, sampler.vocabulary) if token != sampler.end_token]

    def change(trajectory: Trajectory) -> Trajectory:
        tokens = trajectory.token_ids.copy()
        places = np.flatnonzero((rng.random(tokens.size) < share) & (tokens != sampler.end_token))
        tokens[places] = rng.choice(choices, places.size)
        return dataclasses.replace(trajectory, token_ids=tokens)

    return lambda leases: [tuple(map(change, group)) for group in sample(sampler, sampler.model, leases)]


def copied(sampler: TinySampler) -> Make:
    """Sample once and hand that in for every seed."""

    def make(leases: Sequence[Lease]) -> list[Group]:
        ones = sample(
            sampler, sampler.model, [dataclasses.replace(lease, seeds=lease.seeds[:1]) for lease in leases]
        )
        return [
            tuple(
                dataclasses.replace(one, sample_index=index, seed=seed)
                for index, seed in enumerate(lease.seeds)
            )
            for lease, (one,) in zip(leases, ones, strict=True)
        ]

    return make


def cherry_picked(sampler: TinySampler, tries: int) -> Make:
    """Sample with seeds of one's own and hand in the likeliest of several, under the leased seeds."""

    def make(leases: Sequence[Lease]) -> list[Group]:
        rounds = []
        for attempt in range(tries):
            seeds = [[derive_seed("cherry", seed, attempt) for seed in lease.seeds] for lease in leases]
            rounds.append(sample(sampler, sampler.model, leases, seeds))
        return [
            tuple(
                max(column, key=lambda trajectory: float(trajectory.logprobs.mean()))
                for column in zip(*groups, strict=True)
            )
            for groups in zip(*rounds, strict=True)
        ]

    return make


def fake_logprobs(sampler: TinySampler) -> Make:
    """Sample as leased, then claim to have been surer."""

    def change(trajectory: Trajectory) -> Trajectory:
        return dataclasses.replace(trajectory, logprobs=trajectory.logprobs * np.float32(0.5))

    return lambda leases: [tuple(map(change, group)) for group in sample(sampler, sampler.model, leases)]


def one_false_logprob(sampler: TinySampler, seed: int, nats: float = 5.0) -> Make:
    """Sample as leased, and report one token of each group as this many nats less probable."""
    rng = np.random.default_rng(seed)

    def change(group: Group) -> Group:
        first, *rest = group
        logprobs = first.logprobs.copy()
        logprobs[rng.integers(logprobs.size)] -= nats
        return (dataclasses.replace(first, logprobs=logprobs), *rest)

    return lambda leases: [change(group) for group in sample(sampler, sampler.model, leases)]


def one_edited(sampler: TinySampler, seed: int) -> Make:
    """Sample as leased, but take the likeliest other token at one place of one completion of each group.

    What follows is sampled after the edit, and the logprob is honest: only that token's seed tells.
    """
    rng = np.random.default_rng(seed)

    def make(leases: Sequence[Lease]) -> list[Group]:
        groups = sample(sampler, sampler.model, leases)
        rows = np.cumsum([0, *(len(group) for group in groups)])[:-1]
        places = np.array([rng.integers(group[0].token_ids.size) for group in groups])

        def choose(
            place: int, logits: torch.Tensor, drawn: torch.Tensor, _: Float64Array, __: RowSampling
        ) -> torch.Tensor:
            edited = torch.from_numpy(rows[places == place])
            others = logits[edited].scatter(-1, drawn[edited].unsqueeze(-1), -torch.inf)
            others[:, sampler.end_token] = -torch.inf
            found = drawn.clone()
            found[edited] = others.argmax(-1)
            return found

        return sample(sampler, sampler.model, leases, choose=choose)

    return make


def boundary_picked(sampler: TinySampler, width: float) -> Make:
    """Take the next token of the vocabulary wherever its interval begins within `width` of the uniform."""

    def choose(
        _: int, logits: torch.Tensor, drawn: torch.Tensor, u: Float64Array, rows: RowSampling
    ) -> torch.Tensor:
        return draw(logits, torch.from_numpy(np.minimum(u + width, 1.0 - 1e-9)), rows)[0]

    return lambda leases: sample(sampler, sampler.model, leases, choose=choose)


def continued(sampler: TinySampler, begun: Sequence[Group], tokens: int) -> Make:
    """Sample as leased after the first tokens of what another one had begun, and hand these in as given."""

    def make(leases: Sequence[Lease]) -> list[Group]:
        flat = [one for group in begun for one in group]

        def choose(
            place: int, _: torch.Tensor, drawn: torch.Tensor, __: Float64Array, ___: RowSampling
        ) -> torch.Tensor:
            found = drawn.clone()
            for row, one in enumerate(flat):
                if place < min(tokens, one.token_ids.size):
                    found[row] = int(one.token_ids[place])
            return found

        made = sample(sampler, sampler.model, leases, choose=choose)
        return [
            tuple(_after(mine, one.logprobs[:tokens]) for mine, one in zip(group, first, strict=True))
            for group, first in zip(made, begun, strict=True)
        ]

    return make


def _after(trajectory: Trajectory, given: FloatArray) -> Trajectory:
    logprobs = np.concatenate([given, trajectory.logprobs[given.size :]])
    return dataclasses.replace(trajectory, logprobs=logprobs)


def authors_of(begun: Group, tokens: int, worker_id: str) -> tuple[AuthoredSpan, ...]:
    """Return who sampled the first tokens of a group that another one continued."""
    return tuple(
        AuthoredSpan(one.sample_index, worker_id, 0, min(tokens, one.token_ids.size)) for one in begun
    )
