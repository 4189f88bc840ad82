"""Engine: what a rollout worker needs of an inference engine.

An engine gets requests, `step` until they finish, and snapshots in between. It knows no gRPC, leases or
asyncio, so a light one can stand in for vLLM in simulations and service tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, fields
from typing import Any, Protocol

from antiphon.core.frozen import frozen, frozen_by_identity
from antiphon.core.records import (
    Completion,
    DraftingStatistics,
    FinishReason,
    PromptHistory,
    SamplingParameters,
)


@frozen
class EngineRequest:
    """One completion to sample."""

    request_id: str
    """Unique among the requests in flight."""
    prompt_token_ids: tuple[int, ...]
    seed: int
    """Unsigned 64-bit seed of the position-keyed sampler."""
    sampling: SamplingParameters
    group: str = ""
    """Requests of one group have the same prompt and draft from one another; "" stands alone."""
    history: PromptHistory | None = None
    """Past completions of the prompt; the first request of a group decides."""
    prefix_token_ids: tuple[int, ...] = ()
    """Completion tokens that are there already: sampling continues after them, at the positions that
    follow theirs, and they count against `sampling.max_tokens`."""
    turn_begin: int = 0
    """How many of these belong to earlier turns; `sampling.stop` is looked for behind them."""


@frozen_by_identity
class EngineOutput(Completion):
    """One finished completion; a request's prefix is left out, and the spans do not count it."""

    finish_reason: FinishReason
    _: KW_ONLY
    request_id: str
    drafting: DraftingStatistics | None = None
    """What drafting did for this completion; None from an engine that cannot draft."""
    cached_tokens: int = 0
    """Tokens of prompt and prefix whose cache the engine had when it began; 0 where it does not say."""


@frozen_by_identity
class EngineProgress(Completion):
    """What an unfinished request has sampled from some token on, counted as in `EngineOutput`."""

    _: KW_ONLY
    request_id: str


@frozen
class EngineAbilities:
    """What an engine says it can; docs/concepts/engines.md says what each missing ability costs."""

    ids: bool = True
    """Takes and gives token ids. Without, texts are tokenized again, and a token may come back as another."""
    logprobs: bool = True
    """Gives log-probabilities of the processed distribution that each token was drawn from."""
    seeds: bool = True
    """The same request and seed give the same tokens under the same weights, alone or among others."""
    keyed: bool = True
    """Draws by the position-keyed rule, so that others can check or continue a completion token by token."""
    spans: bool = True
    """Says which version sampled which tokens of a request that a swap met."""
    swaps: bool = True
    """Takes new weights while requests run."""
    progress: bool = True
    """Says what unfinished requests have sampled."""
    drafts: bool = True
    """Verifies drafts that are made from history."""
    stops: bool = True
    """Ends a turn at the token that completes a text of `sampling.stop`."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of those that it lacks, in the order of the table."""
        return tuple(one.name for one in fields(self) if not getattr(self, one.name))

    @property
    def outlives_swaps(self) -> bool:
        """Whether a request goes on over a swap; without, it is aborted there and begins again."""
        return self.spans and self.swaps


ALL_ABILITIES = EngineAbilities()


class Engine(Protocol):
    """A batch inference engine that holds one policy version at a time."""

    @property
    def abilities(self) -> EngineAbilities:
        """What it can, from its start on; what it says is what the contract suite holds it to."""

    @property
    def version(self) -> int | None:
        """Policy version of the weights that sample now; None before the first snapshot, and after a
        failure that left none whole."""

    @property
    def weights_digest(self) -> str | None:
        """blake3 digest of the weights that were loaded, as computed when they were verified, or None."""

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        """Serve these weights from the next `step` on; requests in flight continue under them.

        Caches computed under older weights are dropped and recomputed, so that every later
        token is drawn from the new policy alone; spans record the boundary. With
        `rollout.swap_cache=keep` they stay with the requests that computed them, and spans say so.

        Args:
            version: policy version of the tensors, never lower than needed by the caller.
            tensors: checkpoint name -> tensor, as `weights.snapshot.open_snapshot` opens them.
            weights_digest: digest that the tensors must have; it is echoed.

        Raises:
            IntegrityError: when they cannot be served; the weights before sample on, or `version` is None
                and nothing does.
        """

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests; they start with the next `step`."""

    def step(self) -> list[EngineOutput]:
        """Advance every running request by one or more tokens and return those that finished."""

    def progress(self, since: Mapping[str, int]) -> list[EngineProgress]:
        """Return what requests in flight have sampled.

        Args:
            since: request id -> tokens known already; unknown ids and requests without news are
                left out of the answer. So are all by an engine without spans, which begins them again.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; unknown ids are ignored."""

    @property
    def continues(self) -> bool:
        """Whether it continues a prefix exactly as if it had sampled that itself."""

    @property
    def numerics(self) -> str:
        """What decides the bits of its log-probabilities: engines that say the same sample the same tokens.

        "" where the bits depend on the batch as well, so that nobody else samples the same.
        """

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens: ids are in [0, vocabulary_size)."""

    @property
    def drafts(self) -> bool:
        """Return whether the engine drafts, so that history is of use to it."""

    @property
    def unfinished(self) -> int:
        """Number of requests queued or running."""

    def close(self) -> None:
        """Free the engine; it is not used again."""


@frozen
class LoadReport:
    """What came of a swap."""

    serving: int | None
    """Version that samples now; None: nothing does."""
    problem: str = ""
    """Why it is not the one that was asked for; empty when it is."""
