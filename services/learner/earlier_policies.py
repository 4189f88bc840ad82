"""Earlier policies: what stored versions make of a step's tokens, for engines that gave no log-probabilities.

Of the version that a step begins with the engine tells; of an earlier one a second model does, filled with
the snapshot that workers sampled with. It computes as the engine does: packed alike, at the sampling
temperature. So a step depends on its batch and on the weights of the versions that the batch names.

Legend: R sequences of a micro-batch, T completion tokens of the longest of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from antiphon.core.algorithm import AlgorithmSection
from antiphon.core.config import RunConfig
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.records import BatchRow
from antiphon.services.learner.objective import Objective
from antiphon.services.learner.packing import MicroBatch, Packing
from antiphon.services.learner.policy import Policy, load_causal_model, load_published
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import open_snapshot


class EarlierPolicies:
    """One model whose weights are exchanged for those of the version at hand; for one thread."""

    def __init__(self, config: RunConfig, weights: Callable[[int], Mapping[str, torch.Tensor]]) -> None:
        """Prepare; the model is loaded for the first version that is asked for.

        Args:
            config: says which model, its precision and the sampling temperature.
            weights: returns the published tensors of a version, checked; raises IntegrityError without them.
        """
        self._config, self._weights = config, weights
        self._policy: Policy | None = None
        self._version: int | None = None

    def sampled_with(
        self,
        versions: Iterable[int],
        step: int,
        updates: Sequence[Packing],
        begun_with: Sequence[Sequence[torch.Tensor]],
        done: Callable[[], None],
    ) -> list[list[torch.Tensor]]:
        """Return the logprobs of each update's micro-batches, [R, T] nats, under the versions that sampled.

        Args:
            versions: the earlier ones of the step.
            step: that trains on them.
            updates: of the step, on one rank.
            begun_with: the same under the weights that the step begins with.
            done: called after each forward pass.

        Raises:
            IntegrityError: when the weights of a version are damaged or not stored any more.
        """
        found = [list(own) for own in begun_with]
        for version in versions:
            for packing, own in zip(updates, found, strict=True):
                for place, batch in enumerate(packing.of_rank(0)):
                    sampled = batch.staleness == step - version
                    if sampled.any():
                        own[place] = torch.where(sampled, self._logprobs(version, batch), own[place])
                        done()
        return found

    def _logprobs(self, version: int, batch: MicroBatch) -> torch.Tensor:
        policy = self._filled(version)
        with torch.no_grad():
            found: torch.Tensor = policy(batch.to(next(policy.parameters()).device))
        return found.float().cpu()

    def _filled(self, version: int) -> Policy:
        if self._policy is None:
            model = self._config.model
            dtype = torch.float32 if model.dtype == "float32" else torch.bfloat16
            causal = load_causal_model(model.path, dtype, False).requires_grad_(False)
            temperature, wide = self._config.sampling.temperature, model.head == "float32"
            objective = Objective(AlgorithmSection(), 1, temperature, float32_head=wide)  # for its logprobs
            self._policy = Policy(causal.to("cuda" if torch.cuda.is_available() else "cpu"), objective)
        if version != self._version:
            self._version = None  # until all of it is there: what is held may be half of something
            load_published(self._policy.causal_model, self._weights(version))
            self._version = version
        return self._policy


def stored_policies(config: RunConfig, payloads: PayloadStore) -> EarlierPolicies:
    """Return the earlier policies of a run whose snapshots are in a store."""

    def weights(version: int) -> Mapping[str, torch.Tensor]:
        try:
            return open_snapshot(payloads.manifest(version), payloads)
        except UnavailableError as error:
            raise IntegrityError(
                f"version {version}, which sampled tokens of this batch, is not stored any more ({error}); "
                "start a new run, with loop.max_staleness=0 if this happens again"
            ) from error

    return EarlierPolicies(config, weights)


def earlier_versions(rows: Iterable[BatchRow], step: int) -> Sequence[int]:
    """Return the versions before `step` that sampled any token of a step's rows, ascending."""
    return sorted({span.version for row in rows for span in row.spans if span.version < step})


def versions_to_keep(checkpoints: Iterable[int], max_staleness: int) -> frozenset[int]:
    """Return the versions without which a step could not be repeated from one of the checkpoints.

    Those from the checkpoint on are made again by the repetition.

    >>> sorted(versions_to_keep([1, 10], max_staleness=2))
    [0, 8, 9]
    """
    return frozenset(one for made in checkpoints for one in range(max(0, made - max_staleness), made))
