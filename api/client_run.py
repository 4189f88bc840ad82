"""Client run: the contract of a run that a client drives, as the door asks it.

One model of a client is one run of this home with services, journal, ledger and records of its own. A version
is made by each step, of optimizer or load; calls between two steps add up. Everything that changes
the run is on the disk before it is answered, and asking again for what was done changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Protocol

from antiphon.core.client_records import (
    AdamParameters,
    CallResult,
    SampledReply,
    SampleRequest,
    SavedWeights,
    Scores,
    TrainingCall,
)
from antiphon.core.frozen import frozen
from antiphon.core.records import Trajectory


@frozen
class ModelOrder:
    """What a client asks for when it creates a model."""

    rank: int
    """Of its adapters; 0 trains all weights."""
    targets: tuple[str, ...] = ()
    """Of attn, mlp, unembed: where adapters are; empty: attn and mlp."""
    seed: int | None = None
    description: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What the client says of itself; recorded."""


@frozen
class ModelInfo:
    """What is known of a model whose services are up."""

    run_id: str
    rank: int
    """Of its adapters; 0: all weights train."""
    vocabulary_size: int
    max_tokens: int
    """Most tokens of a prompt and its completion."""
    architecture: str
    tokenizer: str
    """Folder of the tokenizer."""


@frozen
class SavedVersion:
    """Weights that were saved, and what they are."""

    saved: SavedWeights
    version: int
    digest: str
    bytes: int
    at: float
    """Unix seconds."""
    expires_at: float | None
    order: ModelOrder
    """Of the model that saved them."""


class ClientRun(Protocol):
    """One model whose services are up. Calls of one model that change it come one after the other."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def version(self) -> int:
        """Return the newest version."""

    async def sample(self, request: SampleRequest, wait_s: float) -> SampledReply:
        """Ask for completions, or join who did, and wait up to `wait_s` seconds for them.

        Raises:
            ContractError: when the request cannot be: a token beyond the vocabulary, no room for
                `max_tokens`, a version whose weights are not kept any more.
            UnavailableError: when the services do not answer.
        """

    async def sequences(self, request_id: str) -> tuple[Trajectory, ...]:
        """Return the completions of a request that was answered; empty where there are none."""

    async def score(self, version: int, token_ids: Sequence[int], top: int) -> Scores:
        """Return the log-probabilities of given tokens under a version, with the `top` best of each place.

        Raises:
            ContractError: as `sample`.
        """

    async def call(self, place: int, call: TrainingCall) -> CallResult:
        """Do a call at place 0, 1, .. since the newest step; `forward_only` ones take no place.

        Raises:
            ContractError: naming what of the data cannot be; nothing was added up then.
            IntegrityError: when the loss is no number.
        """

    async def step(self, step: int, calls: Sequence[TrainingCall], adam: AdamParameters) -> dict[str, float]:
        """Make version step + 1 of all calls since the newest step, given again in order; return its metrics.

        Raises:
            IntegrityError: when gradient or weights are no numbers.
        """

    async def load(self, step: int, source: SavedWeights, optimizer: bool) -> None:
        """Make version step + 1 of saved weights.

        Raises:
            ContractError: when they are not there, or of another model.
        """

    async def save(self, saved: SavedWeights, ttl_s: float | None) -> SavedVersion:
        """Keep the newest version under a name, in place of what had it.

        Raises:
            UnavailableError: when the disk is full; nothing is left then.
        """


class ClientRuns(Protocol):
    """The client-driven runs of one home and one configuration."""

    async def create(self, run_id: str, order: ModelOrder) -> ClientRun:
        """Start a new run, or continue the one that has this id.

        Raises:
            ContractError: when a rank or target cannot be, or no place is free.
            ConfigError: when the configuration cannot be used.
        """

    async def open(self, run_id: str) -> ClientRun:
        """Return a run whose services are up; they are started where they are not.

        Raises:
            ContractError: when there is no such run, or no place is free.
        """

    async def close(self, run_id: str) -> None:
        """Stop the services of a run and give its place back; it stays resumable."""

    def runs(self) -> Sequence[str]:
        """Return the ids of all runs that clients created here, oldest first."""

    def saved(self, run_id: str | None = None) -> Sequence[SavedVersion]:
        """Return what is saved, of one run or of all, oldest first."""

    def find(self, saved: SavedWeights) -> SavedVersion | None:
        """Return what is known of saved weights, or None."""

    async def drop(self, saved: SavedWeights) -> None:
        """Give up saved weights, whether the services of their run are up or not; unknown ones are ignored.

        A snapshot that was kept for them goes when the run's learner looks the next time.

        Raises:
            UnavailableError: when another process has the run; ask again later.
        """
