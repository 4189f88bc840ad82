"""Second objective: advantages, losses and a Qwen3 written from the papers, in float64 and plain torch.

It imports nothing of Antiphon. What it is compared with are the batch, the weights and the choices:
benchmarks/objectives.py. Sources: PPO's clip (arXiv 1707.06347), GRPO (2402.03300), DAPO (2503.14476,
equations 8, 12 and 13), Dr. GRPO (2503.20783), GSPO (2507.18071, equations 5 to 7), CISPO (2506.13585,
equations 4 and 5), dual clip (1912.09729), RLOO (2402.14740), REINFORCE++ (2501.03262), the decoupled
objective (2110.00641), truncated importance sampling (Ionides 2008), the estimators k1, k2 and k3 of
Schulman's note on KL, and on-policy distillation (2306.13649; the reverse KL of each token as its advantage).

Legend: S positions of a sequence, T completion tokens, V vocabulary, G trajectories of a group.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

CLIPS = {
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (0, 4),
}
"""As the papers have them; of CISPO, which gives none, as its trainers have."""
FILTERS = {"sequence": (0.5, 2.0), "geometric": (0.99, 1.01)}
FLOOR = 1e-6
"""Added to a standard deviation; the papers leave open how much."""
Weights = Mapping[str, torch.Tensor]
"""Float64, by the names that Hugging Face gives them."""


@dataclass(frozen=True, slots=True)
class Method:
    """What is chosen; names and defaults as in docs/concepts/objectives.md."""

    objective: str = "dapo"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    decoupled: bool = True
    correction: str = "truncate"
    correction_level: str | None = None
    correction_cap: float = 2.0
    correction_floor: float = 0.5
    sequence_filter: str | None = None
    sequence_filter_low: float | None = None
    sequence_filter_high: float | None = None
    entropy_bonus: float = 0.0
    divisor: str = "sampled"
    baseline: str = "mean"
    normalise_advantages: bool = True
    deviation: str = "group"
    truncated_completions: str = "train"
    overlong_margin_tokens: int | None = None
    overlong_penalty: float = 0.5
    updates_per_step: int = 1
    filter: str = "drop"
    temperature: float = 1.0
    kl: float = 0.0
    kl_estimator: str = "k3"
    kl_place: str = "loss"
    distillation: float = 0.0
    keep_reward: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One completion of a prompt."""

    prompt: list[int]
    tokens: list[int]
    behaviour: torch.Tensor
    """[T] float64, nats."""
    reward: float
    cut_off: bool
    reference: torch.Tensor
    """[T] float64, nats, under a reference model."""


@dataclass(slots=True)
class Found:
    """The loss of one update and what it was made of."""

    loss: torch.Tensor
    magnitude: float
    """The same sum of absolute values, which the loss may be small against."""
    log_ratios: list[torch.Tensor] = field(default_factory=list)
    """[T] of each trajectory, learner minus behaviour, nats."""


def advantages(method: Method, groups: Sequence[Sequence[Trajectory]], longest: int) -> list[list[float]]:
    """Return the advantage of each trajectory of all groups of a step; `longest` completion, in tokens."""

    def shaped(one: Trajectory) -> float:
        reward = one.reward
        if method.kl_place == "reward":
            apart = one.reference - one.behaviour
            kl = -apart if method.kl_estimator == "k1" else apart.exp() - 1 - apart
            reward -= method.kl * float(kl.sum())
        if method.overlong_margin_tokens is None:
            return reward
        beyond = len(one.tokens) - (longest - method.overlong_margin_tokens)
        return reward - method.overlong_penalty * min(1.0, max(0.0, beyond / method.overlong_margin_tokens))

    rewards = [[shaped(one) for one in group if _sampled(method, one)] for group in groups]
    everything = [reward for own in rewards for reward in own]

    def base(own: list[float], reward: float) -> float:
        if method.baseline == "batch":
            return statistics.fmean(everything)
        if method.baseline == "mean" or len(own) == 1:
            return statistics.fmean(own)
        return (math.fsum(own) - reward) / (len(own) - 1)

    found = [
        [shaped(one) - base(own, shaped(one)) if _sampled(method, one) else 0.0 for one in group]
        for group, own in zip(groups, rewards, strict=True)
    ]
    if not method.normalise_advantages or method.objective == "dr_grpo":
        return found
    if method.deviation == "batch":
        pairs = zip(groups, found, strict=True)
        whole = [
            a for group, own in pairs for one, a in zip(group, own, strict=True) if _sampled(method, one)
        ]
        return [[one / (statistics.stdev(whole) + FLOOR) for one in own] for own in found]
    deviations = [statistics.stdev(own) if len(own) > 1 else 0.0 for own in rewards]
    return [[one / (by + FLOOR) for one in own] for own, by in zip(found, deviations, strict=True)]


def _sampled(method: Method, one: Trajectory) -> bool:
    """Tell whether a trajectory counts as sampled at all."""
    return not (method.truncated_completions == "mask" and one.cut_off)


def update(
    method: Method,
    groups: Sequence[tuple[Sequence[Trajectory], Sequence[float]]],
    weights: Weights,
    begun: Weights | None,
    longest: int,
) -> Found:
    """Return the loss of one optimizer update, with its gradient in `weights`.

    Args:
        method: what is chosen.
        groups: of the update, with their advantages; those of equal rewards, which nothing trains on, too.
        weights: with a gradient.
        begun: of the start of the step, or None where that is `weights`.
        longest: completion, in tokens.
    """
    counted = trained = 0
    tokens = trained_tokens = 0
    chosen: list[tuple[Trajectory, float]] = []
    for group, given in groups:
        dropped = method.filter == "drop" and len({one.reward for one in group}) == 1
        for one, advantage in zip(group, given, strict=True):
            if not _sampled(method, one):
                continue
            counted, tokens = counted + 1, tokens + len(one.tokens)
            if not dropped and (method.truncated_completions == "train" or not one.cut_off):
                trained, trained_tokens = trained + 1, trained_tokens + len(one.tokens)
                chosen.append((one, advantage))
    if method.divisor == "trained":
        counted, tokens = trained, trained_tokens
    found = Found(torch.zeros((), dtype=torch.float64), 0.0)
    for one, advantage in chosen:
        rows = logprobs(weights, one, method.temperature)
        learner = rows.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        proximal = learner.detach()
        if begun is not None:
            with torch.no_grad():
                before = logprobs(begun, one, method.temperature)
            proximal = before.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        taught = method.distillation * (one.reference - one.behaviour)
        if method.keep_reward:
            taught = taught + advantage
        losses = token_losses(method, learner, proximal, one.behaviour, taught)
        losses = losses + method.entropy_bonus * (rows.exp() * rows).sum(1)
        if method.kl_place == "loss":
            losses = losses + method.kl * reference_kl(method, learner, one.reference)
        by: float = tokens
        if method.objective in ("grpo", "gspo"):
            by = len(one.tokens) * counted
        elif method.objective == "dr_grpo":
            by = longest * counted
        found.loss = found.loss + losses.sum() / by
        found.magnitude += float(losses.detach().abs().sum()) / by
        found.log_ratios.append((learner - one.behaviour).detach())
    return found


def token_losses(
    method: Method,
    learner: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantage: torch.Tensor,
) -> torch.Tensor:
    """Return the losses [T] of one trajectory's tokens from log-probabilities and advantages [T]."""
    low, high = CLIPS[method.objective]
    low = low if method.clip_low is None else method.clip_low
    high = high if method.clip_high is None else method.clip_high
    ratio = (learner - (proximal if method.decoupled else behaviour)).exp()
    if method.objective == "gspo":  # s_i, equation 7
        ratio = ratio.log().mean().exp().expand_as(ratio)
    if method.objective == "cispo":
        surrogate = ratio.clamp(max=1 + high).detach() * advantage * learner
    else:
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        if method.dual_clip is not None:
            least = torch.maximum(surrogate, method.dual_clip * advantage)
            surrogate = torch.where(advantage < 0, least, surrogate)
    return -surrogate * importance(method, proximal - behaviour)


def reference_kl(method: Method, learner: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the estimates [T] of KL(learner || reference), whose gradients have the mean of the KL's.

    Of k1 that is not its derivative, whose mean is 0, but the one of k2 = k1^2 / 2.
    """
    apart = reference - learner
    if method.kl_estimator == "k3":
        return apart.exp() - 1 - apart
    k2 = apart.square() / 2
    return -apart.detach() + k2 - k2.detach()


def importance(method: Method, gap: torch.Tensor) -> torch.Tensor:
    """Return the weights [T] of tokens whose proximal and behaviour log-probabilities are `gap` [T] apart."""
    if not method.decoupled:
        return torch.ones_like(gap)
    whole = {"sequence": gap.sum().exp(), "geometric": gap.mean().exp()}
    level = method.correction_level or ("geometric" if method.objective == "gspo" else "token")
    weight = gap.exp() if level == "token" else whole[level].expand_as(gap)
    if method.correction == "none":
        weight = torch.ones_like(gap)
    elif method.correction == "truncate":
        weight = weight.clamp(max=method.correction_cap)
    else:
        inside = (weight >= method.correction_floor) & (weight <= method.correction_cap)
        weight = torch.where(inside, weight, 0.0)
    if method.sequence_filter is not None:
        low, high = FILTERS[method.sequence_filter]
        low = low if method.sequence_filter_low is None else method.sequence_filter_low
        high = high if method.sequence_filter_high is None else method.sequence_filter_high
        if not low <= float(whole[method.sequence_filter]) <= high:
            weight = torch.zeros_like(gap)
    return weight


def kl_estimates(log_ratios: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return k1 and k3 of KL(behaviour, learner), nats, from the log ratios of all tokens."""
    gap = torch.cat(list(log_ratios))
    return float(-gap.mean()), float((gap.exp() - 1 - gap).mean())


def logprobs(weights: Weights, one: Trajectory, temperature: float) -> torch.Tensor:
    """Return the log-probabilities [T, V] of every next token where one was sampled, nats."""
    whole = logits(weights, one.prompt + one.tokens)
    return (whole[len(one.prompt) - 1 : -1] / temperature).log_softmax(-1)


HEADS, KV_HEADS, HEAD, THETA, EPSILON = 4, 2, 16, 1e6, 1e-6
"""Of the model: heads of queries, of keys, their size, the base of rotary positions, and of the norms."""


def logits(weights: Weights, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits [S, V] of a Qwen3 (arXiv 2505.09388) whose embeddings are its head."""
    size = len(tokens)
    states = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    steps = torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD
    angles = torch.arange(size, dtype=torch.float64)[:, None] * THETA**-steps
    cos, sin = angles.cos(), angles.sin()
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    number = 0
    while f"model.layers.{number}.input_layernorm.weight" in weights:
        own = {name.removeprefix(f"model.layers.{number}."): w for name, w in weights.items()}
        normed = _norm(states, own["input_layernorm.weight"])

        def heads(name: str, count: int, given: torch.Tensor, own: Weights = own) -> torch.Tensor:
            return (given @ own[f"self_attn.{name}_proj.weight"].T).view(size, count, HEAD)

        query = _turn(_norm(heads("q", HEADS, normed), own["self_attn.q_norm.weight"]), cos, sin)
        key = _turn(_norm(heads("k", KV_HEADS, normed), own["self_attn.k_norm.weight"]), cos, sin)
        value = heads("v", KV_HEADS, normed).repeat_interleave(HEADS // KV_HEADS, 1)
        key = key.repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(HEAD)
        seen = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), value)
        states = states + seen.reshape(size, -1) @ own["self_attn.o_proj.weight"].T
        normed = _norm(states, own["post_attention_layernorm.weight"])
        gate, up = (normed @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        states = states + (gate * gate.sigmoid() * up) @ own["mlp.down_proj.weight"].T
        number += 1
    return _norm(states, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T


def _norm(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values * (values.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * scale


def _turn(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return [S, heads, HEAD] with its halves turned by the angles of their positions, [S, HEAD / 2] each."""
    first, second = values.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
