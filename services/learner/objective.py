"""Objective: one policy-gradient loss, whichever way the batch was cut into micro-batches.

The loss itself is liger-kernel's GRPO loss, and so are the logprobs where the logits of a micro-batch are too
many to be held at once. Here stand the importance weights for stale or mismatched data, and the factors that
make the sum over micro-batches equal the loss of the whole update. The output head works once on each pair of
a state and the token that follows; trajectories that have a pair in common have its logprob in common.

The decoupled objective clips exp(learner - proximal) and weighs each token by
exp(proximal - behaviour), where the proximal policy is the learner at the start of the step.
A reference model adds a KL term, or an advantage to each token; liger takes one advantage for a row only, so
with distillation the loss is an expression of ours, which is liger's where the advantages of a row are equal.
With one update a step the two are the same weights, so no second forward pass is needed. Formulas and
sources: docs/concepts/objectives.md.

Legend: P pairs, R trajectories of a micro-batch, T completion tokens, H hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction, clip_coef_fn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from antiphon.core.algorithm import CROSS_ENTROPY, AlgorithmSection
from antiphon.core.reference_config import ReferenceSection
from antiphon.services.learner.own_objective import OwnLoss, own_objective, token_losses
from antiphon.services.learner.packing import MicroBatch

LOG_RATIO_LIMIT = 20.0
"""Nats. No policy moves a token's probability e^20-fold between two versions: a log-probability is wrong
there. Ratios and weights are bounded by it, and such a token gets no gradient."""

LOGITS_AT_ONCE = 2**22
"""Logits of float32 held from the forward to the backward pass, 16 MiB; more are computed again in parts."""

_LOSS_TYPE = {"grpo": "grpo", "dapo": "dapo", "dr_grpo": "dr_grpo", "gspo": "grpo", "cispo": "cispo"}


@dataclass(frozen=True, slots=True)
class UpdateTotals:
    """What one optimizer update divides by, all its micro-batches together."""

    trajectories: float
    tokens: float
    """Completion tokens."""
    longest: int | None = None
    """Most tokens that the policy may sample of one trajectory, where that has turns."""


NOTHING = UpdateTotals(0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class TokenMetrics:
    """What the loss did with each completion token, kept for the step's metrics."""

    learner_logprobs: torch.Tensor
    """[R, T] float32, nats, detached."""
    altered: torch.Tensor
    """[R, T] bool: the importance weight was truncated or masked."""
    clipped: torch.Tensor
    """[R, T] bool: the ratio was clipped; except for cispo the token gave no gradient."""
    applied: torch.Tensor
    """[R, T] float32: what the gradient of the token's logprob was multiplied by, besides the advantage:
    ratio times weight after cap, mask and clip. 0 where it was masked or clipped away, and on padding."""


class LossBatch(Protocol):
    """What the loss asks of a micro-batch's trajectories; as in `MicroBatch`."""

    @property
    def mask(self) -> torch.Tensor: ...
    @property
    def behaviour_logprobs(self) -> torch.Tensor: ...
    @property
    def advantages(self) -> torch.Tensor: ...


class Objective:
    """The loss of a micro-batch as its share of the whole update's loss."""

    def __init__(
        self,
        algorithm: AlgorithmSection,
        max_completion_tokens: int,
        temperature: float,
        reference: ReferenceSection | None = None,
        float32_head: bool = False,
    ) -> None:
        """Choose the loss.

        Args:
            algorithm: the section of the configuration.
            max_completion_tokens: dr_grpo divides by it, unless a batch has turns (`UpdateTotals.longest`).
            temperature: the one the behaviour policy sampled with; 0 (greedy) counts as 1.
            reference: what a reference model's logprobs do; None: nothing.
            float32_head: whether states meet the output embedding in float32, whatever their precision is.

        Raises:
            ConfigError: when the objective is a function of the user's that is not there, or is no loss.
        """
        self._algorithm, self._reference = algorithm, reference or ReferenceSection()
        self._float32_head = float32_head
        self.temperature = temperature or 1.0
        self._own: OwnLoss | None = None
        self.source = ""
        """The digest of the user's function, where it is one."""
        if algorithm.own_objective:
            self._own, self.source = own_objective(algorithm.objective)
        self._supervised = algorithm.objective == CROSS_ENTROPY
        name = "dapo" if self._own or self._supervised else algorithm.objective
        low, high = algorithm.clips
        self.options: dict[str, Any] = {
            "beta": 0.0,
            "epsilon_low": low,
            # liger takes cispo's upper bound as the cap itself, and the others' as its distance from 1.
            "epsilon_high": high + 1.0 if name == "cispo" else high,
            "delta": algorithm.dual_clip,
            "loss_type": _LOSS_TYPE[name],
            "importance_sampling_level": "sequence" if name == "gspo" else "token",
            "max_completion_length": max_completion_tokens,
        }

    def logprobs(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        batch: MicroBatch,
        temperature: float | None = None,
    ) -> torch.Tensor:
        """Return the learner's logprobs [R, T], nats, with a gradient where autograd records.

        Args:
            hidden: [P, H] states that predict the tokens of the batch's pairs.
            head: [V, H] output embedding.
            batch: the micro-batch.
            temperature: of the distribution; None: that of the run's sampling.
        """
        temperature = self.temperature if temperature is None else temperature
        hidden = hidden.float() if self._float32_head else hidden
        if hidden.dtype != torch.bfloat16 and len(hidden) * len(head) <= LOGITS_AT_ONCE:
            logits = hidden @ head.T.to(hidden.dtype)
            if temperature != 1.0:
                logits = logits / temperature
            found = -functional.cross_entropy(logits, batch.pair_ids, reduction="none")
        else:
            found = LigerFusedLinearPPOBase.chunk_forward(
                hidden[None], head, batch.pair_ids[None], temperature=temperature
            )[0]
        taken: torch.Tensor = found.index_select(0, batch.token_index.flatten()).view_as(batch.mask)
        return taken

    def loss(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        batch: MicroBatch,
        totals: UpdateTotals,
        proximal_logprobs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, TokenMetrics]:
        """Return the micro-batch's share of the update's loss, and the metrics behind it.

        Args:
            hidden: [P, H] with gradient.
            head: [V, H] with gradient.
            batch: the micro-batch.
            totals: of the whole update; the shares of its micro-batches add up to its loss.
            proximal_logprobs: [R, T] logprobs at the start of the step, or None when no update
                of the step came before this one.
        """
        logprobs = self.logprobs(hidden, head, batch)
        if self._supervised:
            return self._cross_entropy(logprobs, batch, totals)
        loss, found = self._policy_loss(logprobs, batch, totals, proximal_logprobs)
        if bonus := self._algorithm.entropy_bonus:
            loss = loss - self._divided(bonus * self.entropies(hidden, head, batch), batch, totals)
        if self._reference.kl and self._reference.kl_place == "loss":
            loss = loss + self._divided(self._reference.kl * self._kl(logprobs, batch), batch, totals)
        return loss, found

    def _policy_loss(
        self,
        logprobs: torch.Tensor,
        batch: MicroBatch,
        totals: UpdateTotals,
        proximal_logprobs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, TokenMetrics]:
        """Return what `loss` does, without a bonus and the KL to a reference model."""
        if self._own is not None:
            return self._own_loss(logprobs, batch, totals)
        old, weight, found = self.ingredients(logprobs.detach(), batch, proximal_logprobs)
        if self._reference.distillation:
            losses = self._token_losses(logprobs, logprobs.detach() if old is None else old, batch)
            return self._divided(losses * weight, batch, totals), found
        # Where each trajectory counts alike, its branches do by their parts of its tokens. The loss of a
        # token is in proportion to the advantage.
        shares = batch.shares if self.options["loss_type"] == "grpo" else 1.0
        longest = totals.longest or self.options["max_completion_length"]
        loss, _ = LigerFusedLinearGRPOFunction.ppo_loss_fn(
            logprobs,
            batch.mask,
            batch.advantages * shares,
            batch.mask,
            old_per_token_logps=old,
            vllm_is_ratio=weight,
            num_items_in_batch=totals.tokens,
            **self.options | {"max_completion_length": longest},
        )
        return self.share(loss, len(batch.advantages), totals), found

    def _token_losses(self, logprobs: torch.Tensor, old: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return liger's loss of each token, [R, T], with an advantage of each token; without the weights."""
        options, advantage = self.options, self._advantages(batch)
        gap = logprobs - old
        if options["importance_sampling_level"] == "sequence":
            gap = (gap * batch.mask).sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)
        ratio = gap.exp()
        clipped, *_ = clip_coef_fn(
            ratio, options["epsilon_low"], options["epsilon_high"], options["loss_type"]
        )
        if options["loss_type"] == "cispo":
            gained: torch.Tensor = clipped * advantage * logprobs
        else:
            bounded = ratio if options["delta"] is None else ratio.clamp(max=options["delta"])
            gained = torch.min(bounded * advantage, clipped * advantage)
        return -gained

    def _advantages(self, batch: LossBatch) -> torch.Tensor:
        """Return the advantage of each token, [R, T]; [R, 1] without distillation."""
        section = self._reference
        if not section.distillation:
            return batch.advantages[:, None]
        assert isinstance(batch, MicroBatch) and batch.reference_logprobs is not None, "checked by the step"
        apart = (batch.reference_logprobs - batch.behaviour_logprobs) * self._counted(batch)
        ours = section.distillation * apart.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return ours + batch.advantages[:, None] if section.keep_reward else ours

    def _kl(self, logprobs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the estimate of KL(learner || reference) of each token, [R, T] nats, and its gradient.

        k3's is its derivative. k1's derivative has the mean 0, whatever the reference; its gradient here is
        k1 times that of the logprob, by the score, whose mean is the gradient of the KL: that of
        k1 in the reward, and of k2 = k1^2 / 2 in the loss.
        """
        assert batch.reference_logprobs is not None, "checked by the step"
        apart = (batch.reference_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        if self._reference.kl_estimator == "k3":
            return torch.expm1(apart) - apart
        k1 = -apart.detach()
        return k1 + k1 * (logprobs - logprobs.detach())

    def _counted(self, batch: MicroBatch) -> torch.Tensor:
        """Return the mask [R, T]; of a dummy, which trains nothing, zeros."""
        return batch.mask if batch.rows else torch.zeros_like(batch.mask)

    def _divided(self, losses: torch.Tensor, batch: MicroBatch, totals: UpdateTotals) -> torch.Tensor:
        """Return what losses of tokens, [R, T], add to the update's loss, divided as the objective is."""
        losses, kind = losses * self._counted(batch), self.options["loss_type"]
        if kind == "grpo":
            of_rows = losses.sum(1) / batch.mask.sum(1).clamp(min=1.0) * batch.shares
            return of_rows.sum() / totals.trajectories
        if kind == "dr_grpo":
            longest = totals.longest or self.options["max_completion_length"]
            return losses.sum() / (totals.trajectories * longest)
        count = LigerFusedLinearPPOBase._compute_dapo_normalizer(batch.mask, num_items_in_batch=totals.tokens)
        return losses.sum() / count

    def _cross_entropy(
        self, logprobs: torch.Tensor, batch: MicroBatch, totals: UpdateTotals
    ) -> tuple[torch.Tensor, TokenMetrics]:
        """Return minus the mean logprob of the tokens that are learned, over the whole update."""
        nowhere = torch.zeros_like(batch.mask, dtype=torch.bool)
        found = TokenMetrics(logprobs.detach(), nowhere, nowhere, batch.mask)
        return -self._divided(logprobs, batch, totals), found

    def entropies(self, hidden: torch.Tensor, head: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the entropies [R, T], nats, of the distributions at the run's temperature; see `logprobs`.

        Logits are made again in the backward pass, at most LOGITS_AT_ONCE at a time.
        """
        hidden = hidden.float() if self._float32_head else hidden
        at_once = max(1, LOGITS_AT_ONCE // len(head))
        options = {"use_reentrant": False, "preserve_rng_state": False}
        parts = [checkpoint(_entropy, x, head, self.temperature, **options) for x in hidden.split(at_once)]
        found: torch.Tensor = torch.cat(parts).index_select(0, batch.token_index.flatten())
        return found.view_as(batch.mask)

    def _own_loss(
        self, logprobs: torch.Tensor, batch: MicroBatch, totals: UpdateTotals
    ) -> tuple[torch.Tensor, TokenMetrics]:
        """Return what `loss` does, by the user's function."""
        assert self._own is not None
        learner, advantage = logprobs.detach(), batch.advantages[:, None]
        beyond = ((learner - batch.behaviour_logprobs) * batch.mask).abs() > LOG_RATIO_LIMIT
        # A dummy would train by what of the loss does not go with the advantage.
        mask = batch.mask.masked_fill(beyond, 0.0) if batch.rows else torch.zeros_like(batch.mask)
        losses, gradient = token_losses(self._own, learner, batch.behaviour_logprobs, batch.advantages, mask)
        # As liger divides: by the tokens of the whole update, of which each rank has its part.
        count = LigerFusedLinearPPOBase._compute_dapo_normalizer(mask, num_items_in_batch=totals.tokens)
        # The second term is 0, and has the gradient of the first.
        loss = (losses.sum() + ((logprobs - learner) * gradient).sum()) / count
        moves = (gradient != 0) | (advantage == 0)
        applied = torch.where(advantage == 0, 0.0, -gradient / advantage)
        return loss, TokenMetrics(learner, beyond, (batch.mask > 0) & ~moves, applied)

    def share(self, loss: torch.Tensor, sequences: int, totals: UpdateTotals) -> torch.Tensor:
        """Return the share of the update's loss that liger's loss of this many of its sequences is."""
        if self.options["loss_type"] in ("grpo", "dr_grpo"):
            # These two average over the sequences they see; make it an average over all trajectories.
            return loss * (sequences / totals.trajectories)
        return loss

    def ingredients(
        self, learner: torch.Tensor, batch: LossBatch, proximal_logprobs: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor, TokenMetrics]:
        """Return what the ratio compares with, each token's weight, and the metrics; [R, T], no gradient.

        Args:
            learner: [R, T] the learner's logprobs, nats, detached.
            batch: the micro-batch.
            proximal_logprobs: as in `loss`.
        """
        proximal = learner if proximal_logprobs is None else proximal_logprobs
        if self._algorithm.decoupled:
            old = proximal_logprobs
            weight, altered = self.importance_weights(proximal, batch)
        else:
            old = batch.behaviour_logprobs
            weight, altered = torch.ones_like(batch.mask), torch.zeros_like(batch.mask, dtype=torch.bool)
        applied = weight * batch.mask
        clipped = torch.zeros_like(altered)
        if old is not None:
            factor, clipped, beyond = self._clip(learner, old, batch)
            clipped &= applied > 0
            applied = applied * factor
            # Further apart than this would overflow, or be 0 times infinity.
            old = torch.where(beyond, learner - (learner - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), old)
            weight = torch.where(beyond, 0.0, weight)
        return old, weight, TokenMetrics(learner, altered, clipped, applied)

    def _clip(
        self, learner: torch.Tensor, old: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what the clip leaves of the ratio's part in the gradient, which tokens it acts on, and
        which are further apart than LOG_RATIO_LIMIT; [R, T] each.
        """
        low, high = self._algorithm.clips
        dual = self._algorithm.dual_clip
        gap = (learner - old) * batch.mask
        beyond = ~(gap.abs() <= LOG_RATIO_LIMIT)
        gap = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        if self.options["importance_sampling_level"] == "sequence":
            beyond = beyond.any(1, keepdim=True).expand_as(gap)
            gap = (gap.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)).expand_as(gap)
        ratio = gap.exp()
        if self._algorithm.objective == "cispo":
            clipped = ratio > 1.0 + high
            left = ratio.clamp(max=1.0 + high)
        else:
            advantage = self._advantages(batch)
            clipped = ((ratio > 1.0 + high) & (advantage > 0)) | ((ratio < 1.0 - low) & (advantage < 0))
            if dual is not None:
                clipped |= (ratio > dual) & (advantage < 0)
            left = ratio.masked_fill(clipped, 0.0)
        return left.masked_fill(beyond, 0.0), (clipped | beyond) & (batch.mask > 0), beyond

    def importance_weights(
        self, proximal: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights [R, T] of exp(proximal - behaviour) and which of them were altered.

        At sequence level a trajectory's weight is the product over its tokens, at geometric level the
        geometric mean. It is 0 where a token is further apart than LOG_RATIO_LIMIT, whatever the cap, and in
        trajectories that the sequence filter leaves out.
        """
        weight, altered = self._weights(proximal, batch)
        if level := self._algorithm.sequence_filter:
            low, high = self._algorithm.filter_bounds
            whole = _of_sequence((proximal - batch.behaviour_logprobs) * batch.mask, batch.mask, level)
            whole = whole.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            left_out = ((whole < low) | (whole > high)) & (batch.mask > 0)
            weight, altered = weight.masked_fill(left_out, 0.0), altered | left_out
        return weight, altered

    def _weights(self, proximal: torch.Tensor, batch: LossBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `importance_weights` before the sequence filter."""
        algorithm = self._algorithm
        distance = (proximal - batch.behaviour_logprobs) * batch.mask
        beyond = distance.abs() > LOG_RATIO_LIMIT  # what is no number goes on to the loss, which names it
        if algorithm.correction == "none":
            return torch.where(beyond, 0.0, torch.ones_like(batch.mask)), beyond
        if algorithm.weight_level != "token":
            beyond = beyond.any(1, keepdim=True).expand_as(beyond)
            distance = _of_sequence(distance, batch.mask, algorithm.weight_level)
        weight = distance.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        if algorithm.correction == "truncate":
            altered = weight > algorithm.correction_cap
            weight = weight.clamp(max=algorithm.correction_cap)
        else:
            altered = (weight > algorithm.correction_cap) | (weight < algorithm.correction_floor)
            weight = weight.masked_fill(altered, 0.0)
        weight, altered = weight.masked_fill(beyond, 0.0), altered | beyond
        # Liger multiplies losses of padding by the mask afterwards: they must be finite.
        return torch.where(batch.mask > 0, weight, 1.0), altered & (batch.mask > 0)


def _of_sequence(distance: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """Return the sum of a sequence's log ratios, at geometric level their mean, for each token; [R, T]."""
    found = distance.sum(1, keepdim=True)
    if level == "geometric":
        found = found / mask.sum(1, keepdim=True)
    return found.expand_as(mask)


def _entropy(hidden: torch.Tensor, head: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the entropies [P] of next tokens, nats, from [P, H] states and the [V, H] output embedding."""
    logits = hidden @ head.T.to(hidden.dtype)
    found = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return -(found.exp() * found).sum(-1)
