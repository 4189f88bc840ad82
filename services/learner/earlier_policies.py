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
from antiphon.services.learner.objective import Objective
from antiphon.services.learner.packing import MicroBatch, Packing
from antiphon.services.learner.policy import Policy, load_causal_model, load_published
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import open_snapshot


class EarlierPolicies:
    """One model whose weights are exchanged for those of the version at hand; for one thread."""

    def __init__(self, config: RunConfig, weights: Callable[[int], Mapping[str, torch.Tensor]]) -> None:
        """Prepare; the model is loaded for the first version that is asked for.

        `weights` returns the published tensors of a version, checked, or raises IntegrityError without them.
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

        `begun_with` has those under the weights that `step` begins with, kept where none of the earlier
        `versions` sampled; `done` is called after each forward pass.

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
        if self._policy is None:
            model, temperature = self._config.model, self._config.sampling.temperature
            causal = load_causal_model(model.path, getattr(torch, model.dtype), False).requires_grad_(False)
            # Its logprobs alone are asked for, whatever the run's own loss is.
            objective = Objective(AlgorithmSection(), 1, temperature, float32_head=model.head == "float32")
            self._policy = Policy(causal.to("cuda" if torch.cuda.is_available() else "cpu"), objective)
        if version != self._version:
            self._version = None  # until all of it is there: what is held may be half of something
            load_published(self._policy.causal_model, self._weights(version))
            self._version = version
        with torch.no_grad():
            found: torch.Tensor = self._policy(batch.to(next(self._policy.parameters()).device))
        return found.float().cpu()


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


def versions_to_keep(checkpoints: Callable[[], Iterable[int]], max_staleness: int) -> frozenset[int]:
    """Return the versions without which a step could not be repeated from one of the checkpoints.

    >>> sorted(versions_to_keep(lambda: [1, 10], max_staleness=2))
    [0, 8, 9]
    """
    return frozenset(one for made in checkpoints() for one in range(max(0, made - max_staleness), made))
