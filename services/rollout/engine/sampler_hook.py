"""Sampler hook: draws the tokens of vLLM's batches and keeps their log-probabilities, and drafts for it.

vLLM's runner calls `_sample` once per step with the logits of the whole batch. The hook replaces
it, finds every row's request in a table of its own and writes the log-probability of each
drawn token straight into that table, so the engine carries none through its Python lists. Where a
step verifies drafts, each request owns one row per draft and one more. With the native sampler
vLLM draws the tokens and only the bookkeeping is ours.

Drafts come through vLLM's public `custom_class` hook. It names no request in that call, so the drafter reads
the rows from the runner it is bound to. A failure in the scheduler never reaches the engine: the scheduler
logs it once and drafts no more.

Legend: B requests of the batch, R rows of the step (B, or B + drafts), L longest sequence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from antiphon.core.errors import ConfigError
from antiphon.core.records import FloatArray, SamplingParameters
from antiphon.sampling.keyed_sampler import PLAIN, RowSampling, request_key, verify_chain
from antiphon.sampling.rules import RULES
from antiphon.services.rollout.drafting.scheduler import DraftScheduler

Int64Array = npt.NDArray[np.int64]


SAMPLING = np.dtype([("key", "u8"), ("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8"), ("greedy", "?")])
"""What the table keeps of a request; greedy ones have no temperature and cut nothing off."""


class SamplerTable:
    """Sampling state of the requests in flight, one slot each, found by request id."""

    def __init__(self, capacity: int, max_model_len: int, device: torch.device) -> None:
        """Make a table of `capacity` slots; it doubles when more requests are in flight.

        Rejected drafts may be noted beyond a sequence's end, so `max_model_len` has room for them.
        """
        self.slots: dict[str, int] = {}
        """By request id."""
        self._free = list(range(capacity - 1, -1, -1))
        self.rows = np.zeros(capacity, dtype=SAMPLING)
        """By slot: the request's key and how it is sampled."""
        self._logprobs = torch.zeros(capacity, max_model_len, dtype=torch.float32, device=device)

    def admit(self, request_id: str, seed: int, sampling: SamplingParameters) -> int:
        """Give a request a slot and return it."""
        if not self._free:
            old = len(self.rows)
            self._free = list(range(2 * old - 1, old - 1, -1))
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
            self._logprobs = torch.cat([self._logprobs, torch.zeros_like(self._logprobs)])
        slot = self.slots[request_id] = self._free.pop()
        kept = sampling.temperature, sampling.top_k, sampling.top_p, False
        how = kept if sampling.temperature else (1.0, 0, 1.0, True)
        self.rows[slot] = (request_key(seed), *how)
        return slot

    def release(self, request_id: str) -> int:
        """Take a request's slot back and return it."""
        slot = self.slots.pop(request_id)
        self._free.append(slot)
        return slot

    def record(self, slots: torch.Tensor, positions: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Keep the log-probabilities [R] of the tokens drawn at `positions` [R]."""
        self._logprobs[slots, positions] = logprobs

    def logprobs(self, request_id: str, start: int, stop: int) -> FloatArray:
        """Return a copy of a request's log-probabilities at positions [start, stop), float32."""
        row = self._logprobs[self.slots[request_id], start:stop]
        return np.array(row.cpu().numpy(), dtype=np.float32)


class SamplerHook:
    """Stands in for the `_sample` method of one vLLM model runner."""

    def __init__(
        self,
        runner: Any,
        table: SamplerTable,
        sampler: str,
        rule: str,
        vocabulary: int,
        scheduler: DraftScheduler | None,
    ) -> None:
        """Replace `_sample` of vLLM's V1 runner; `scheduler` is None in an engine that never drafts.

        The keyed sampler draws by `rule`, one of `rules.RULES`.
        """
        from vllm.v1.outputs import SamplerOutput

        self.slots: Int64Array = np.zeros(0, dtype=np.int64)
        """[B] slot of each row of the batch in the step that runs or ran last."""
        self.rows = 0
        """R of that step."""
        self.accepted = 0
        """Drafts accepted in that step."""
        self.decoded_only = False
        """Whether that step advanced sequences only, without taking in a prompt."""
        self._output = SamplerOutput
        self._runner = runner
        self._table = table
        self._scheduler = scheduler
        self._vocabulary = vocabulary
        self._device = torch.device(runner.device)
        self._native = runner._sample
        self._draw = RULES[rule].draw
        self._metadata: Any = None
        self._keyed = sampler == "keyed"
        runner._sample = self._sample

    @contextmanager
    def away(self) -> Iterator[list[torch.Tensor]]:
        """Let vLLM draw by itself inside the block: its requests are none of the table's.

        Yields where the log-probabilities come, [T, V] float32 nats, that prompts are scored with inside; to
        hand them out vLLM would sort a whole vocabulary.
        """
        sampler, found = self._runner.sampler, list[torch.Tensor]()
        gather = sampler.gather_logprobs

        def kept(scores: torch.Tensor, *more: Any) -> Any:
            found.append(scores)
            return gather(scores, *more)

        self._runner._sample, sampler.gather_logprobs = self._native, kept
        try:
            yield found
        finally:
            self._runner._sample = self._sample
            del sampler.gather_logprobs

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        begun = perf_counter()
        batch = self._runner.input_batch
        metadata = batch.sampling_metadata
        if metadata is not self._metadata:
            # vLLM makes new metadata exactly when rows come, go or move.
            self._compose(batch, metadata)
        size = batch.num_reqs
        lengths = batch.num_tokens_no_spec[:size].astype(np.int64)
        self.decoded_only = bool(
            (batch.num_computed_tokens_cpu[:size] >= batch.num_prompt_tokens[:size]).all()
        )
        if spec_decode_metadata is None:
            output = self._sample_rows(logits, lengths)
            self.rows, self.accepted = size, 0
            if self._scheduler is not None:
                self._scheduler.passed(self.slots)
        else:
            drafted = np.asarray(spec_decode_metadata.num_draft_tokens, dtype=np.int64)
            verify = self._verify_keyed if self._keyed else self._verify_native
            accepted, output = verify(logits, spec_decode_metadata, lengths, drafted)
            self.rows, self.accepted = size + int(drafted.sum()), int(accepted.sum())
            if self._scheduler is not None:
                self._scheduler.verified(self.slots, drafted, accepted)
        if self._scheduler is not None:
            self._scheduler.sampled(size, perf_counter() - begun)
        return output

    def _sample_rows(self, logits: torch.Tensor, lengths: Int64Array) -> Any:
        if self._keyed:
            tokens, logprobs = self._draw(logits, self._keys, lengths, self._rows)
            tokens = tokens.to(torch.int32).unsqueeze(-1)
        else:
            drawn = self._native(logits, None)
            tokens, logprobs = drawn.sampled_token_ids, drawn.logprobs_tensors.logprobs[:, 0]
        self._table.record(self._slot_rows, torch.from_numpy(lengths).to(self._device), logprobs)
        return self._output(sampled_token_ids=tokens, logprobs_tensors=None)

    def _verify_keyed(
        self, logits: torch.Tensor, metadata: Any, lengths: Int64Array, drafted: Int64Array
    ) -> tuple[Int64Array, Any]:
        rows = drafted + 1
        starts = np.cumsum(rows) - rows
        positions = np.repeat(lengths - starts, rows) + np.arange(int(rows.sum()))
        sampling = self._rows.repeat(torch.from_numpy(rows).to(self._device))
        tokens, logprobs = self._draw(logits, np.repeat(self._keys, rows), positions, sampling)
        drafts = metadata.draft_token_ids.cpu().numpy().astype(np.int64)
        accepted, emitted = verify_chain(tokens.cpu().numpy(), drafts, drafted)
        # Rows after a rejection are noted too; what is drawn there later overwrites them.
        slots = torch.from_numpy(np.repeat(self.slots, rows)).to(self._device)
        self._table.record(slots, torch.from_numpy(positions).to(self._device), logprobs)
        output = self._output(
            sampled_token_ids=torch.from_numpy(emitted).to(self._device), logprobs_tensors=None
        )
        return accepted, output

    def _verify_native(
        self, logits: torch.Tensor, metadata: Any, lengths: Int64Array, drafted: Int64Array
    ) -> tuple[Int64Array, Any]:
        drawn = self._native(logits, metadata)
        tokens = drawn.sampled_token_ids
        emitted = (tokens >= 0).cpu().numpy()
        requests, offsets = np.nonzero(emitted)
        logprobs = drawn.logprobs_tensors.logprobs[:, 0].view(tokens.shape)[
            torch.from_numpy(requests).to(self._device), torch.from_numpy(offsets).to(self._device)
        ]
        slots = torch.from_numpy(self.slots[requests]).to(self._device)
        positions = torch.from_numpy(lengths[requests] + offsets).to(self._device)
        self._table.record(slots, positions, logprobs)
        accepted = emitted.sum(axis=1).astype(np.int64) - 1
        return accepted, self._output(sampled_token_ids=tokens, logprobs_tensors=None)

    def _compose(self, batch: Any, metadata: Any) -> None:
        if self._keyed:
            _refuse_unkeyed(metadata)
        table = self._table
        slots = self.slots = np.array([table.slots[name] for name in batch.req_ids[: batch.num_reqs]])
        self._slot_rows = torch.from_numpy(slots).to(self._device)
        rows = table.rows[slots]
        columns = (rows[name].copy() for name in SAMPLING.names or ())  # torch takes no such strides
        self._keys, temperature, top_k, top_p, greedy = columns
        if (temperature == 1.0).all() and not top_k.any() and (top_p == 1.0).all() and not greedy.any():
            self._rows = PLAIN
        else:
            top_k = np.where(top_k == 0, self._vocabulary, top_k)
            self._rows = RowSampling(
                temperature=None if (temperature == 1.0).all() else self._on_device(temperature),
                top_k=None if (top_k >= self._vocabulary).all() else self._on_device(top_k),
                top_p=None if (top_p == 1.0).all() else self._on_device(top_p),
                greedy=self._on_device(greedy) if greedy.any() else None,
                all_greedy=bool(greedy.all()),
            )
        self._metadata = metadata

    def _on_device(self, values: np.ndarray[Any, np.dtype[Any]]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _refuse_unkeyed(metadata: Any) -> None:
    """Refuse what would change the logits without the keyed sampler's knowledge."""
    changed = [
        name
        for name, used in (
            ("penalties", not metadata.no_penalties),
            ("allowed token ids", metadata.allowed_token_ids_mask is not None),
            ("bad words", bool(metadata.bad_words_token_ids)),
        )
        if used
    ]
    if changed:
        raise ConfigError(
            f"the keyed sampler cannot apply {', '.join(changed)}; use sampling.sampler=native for them"
        )


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
