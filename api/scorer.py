"""Scorer: the contract of a model that never changes and says how probable given tokens are."""

from collections.abc import Sequence
from typing import Protocol

from antiphon.core.records import FloatArray, IntArray


class Scorer(Protocol):
    """Scores completions under fixed weights, as often as it is asked."""

    async def score(
        self, prompt_token_ids: IntArray, completions: Sequence[IntArray]
    ) -> Sequence[FloatArray]:
        """Return the log-probability of each token of each completion, [T] float32 nats.

        They are those of the full distribution at the temperature that the run samples with; a run that
        samples greedily counts as 1.

        Args:
            prompt_token_ids: [P] int32, at least one.
            completions: [T] int32 each; what follows the prompt.

        Raises:
            ContractError: when there is no prompt, or a token that the model does not have.
            UnavailableError: when it does not answer in time.
        """
