"""HistoryDrafter: the class that vLLM's public `custom_class` hook asks for drafts.

vLLM names no request in that call, so the drafter reads the rows from the runner it is bound to.
A failure in the scheduler never reaches the engine: the scheduler logs it once and drafts no more.
"""

from typing import Any

import numpy as np

from antiphon.services.rollout.drafting.scheduler import DraftScheduler

CLASS_PATH = f"{__name__}.HistoryDrafter"
"""What `speculative_config.model` must say."""


class HistoryDrafter:
    """Drafts for vLLM's V1 runner, from the scheduler it is bound to."""

    def __init__(self, vllm_config: Any) -> None:
        """Take vLLM's configuration; nothing is drafted before `bind`."""
        self.window: int = vllm_config.speculative_config.num_speculative_tokens
        self.outstanding = False
        """Whether the last call drafted anything, so that the next step verifies."""
        self._runner: Any = None
        self._hook: Any = None
        self._scheduler: DraftScheduler | None = None

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """Load nothing: drafts come from text, not from a model."""

    def bind(self, runner: Any, hook: Any, scheduler: DraftScheduler) -> None:
        """Draft for this runner from now on; `hook` knows the slot of each of its rows."""
        self._runner, self._hook, self._scheduler = runner, hook, scheduler

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return the drafts of each row, as vLLM's hook wants them.

        Args:
            sampled_token_ids: what the step sampled, one list per row.
            num_tokens_no_spec: [>= B] length of each sequence, drafts excluded.
            token_ids_cpu: [>= B, L] the sequences.
            slot_mappings: unused.
        """
        rows = len(sampled_token_ids)
        if self._scheduler is None:
            return [[] for _ in range(rows)]
        slots = self._hook.slots
        lengths = np.asarray(num_tokens_no_spec[: len(slots)], dtype=np.int64)
        drafts: list[list[int]] = self._scheduler.propose(slots, token_ids_cpu, lengths) or [
            [] for _ in range(rows)
        ]
        self.outstanding = any(drafts)
        return drafts

    def propose_now(self) -> list[list[int]]:
        """Do what `propose` does, after a step in which vLLM did not ask."""
        batch = self._runner.input_batch
        return self.propose([[]] * batch.num_reqs, batch.num_tokens_no_spec, batch.token_ids_cpu)
