"""Client records: what a client that writes its own loop asks of a run, and what it hears.

Legend: T positions of one datum, P prompt tokens, K most probable tokens of a position.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

import numpy as np
import numpy.typing as npt

from antiphon.core.errors import ContractError
from antiphon.core.frozen import frozen, frozen_by_identity
from antiphon.core.records import FloatArray, IntArray, SamplingParameters, Trajectory

CLIENT = "client"
"""`environment.name` of a run whose prompts, rewards and steps come from a client."""
LOSSES = (
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "cispo",
    "gspo",
    "dro",
    "stable_reinforce",
)
"""Losses of a `TrainingCall`; the last is our decoupled objective, on recorded log-probabilities."""


@frozen
class SampleRequest:
    """Completions of one prompt that a client asks for; its seeds decide them, whichever worker samples."""

    request_id: str
    """Unique in the run, 1 to 128 of A-Z a-z 0-9 . _ : -; asking again with it is the same request."""
    prompt_token_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """Unsigned 64-bit seed of each completion."""
    sampling: SamplingParameters
    version: int | None
    """Sampled by exactly this version; None: by the newest ones, swaps included."""
    max_staleness: int = 0
    """Where no version is named: how many versions the oldest token may be behind the newest version at the
    time of the request."""


@frozen_by_identity
class SampledReply:
    """The completions of a request, or why there are none yet."""

    trajectories: tuple[Trajectory, ...] = ()
    """In the order of the seeds; empty while it is sampled."""
    waiting_for: str = ""
    """What it waits for, as a sentence."""
    cached_tokens: int = 0
    """Prompt tokens whose cache the engine had before each of the completions; 0 where it does not say."""


@frozen_by_identity
class Datum:
    """One sequence to train on. All arrays of `inputs` have T values, one for each target."""

    token_ids: IntArray
    """[T] int32: what the model reads; position t predicts target t after tokens 0 .. t."""
    targets: npt.NDArray[np.int64]
    """[T] int64; anything where the position has no weight or advantage."""
    inputs: Mapping[str, FloatArray]
    """By name, [T] float32 each: weights, logprobs, advantages, mask and what else the loss takes."""
    sequences: tuple[tuple[str, int, int, int], ...] = ()
    """(sequence id, its first token, position in `targets`, tokens) of spans that the door sampled."""


@frozen_by_identity
class TrainingCall:
    """One call for a loss over some data, whose gradients add up until a step takes them."""

    loss: str
    """One of `LOSSES`."""
    config: Mapping[str, float]
    """Numbers of the loss, such as clip_low_threshold."""
    data: tuple[Datum, ...]
    forward_only: bool = False
    """Only log-probabilities and metrics are asked for."""


@frozen_by_identity
class CallResult:
    """What came of a call."""

    logprobs: tuple[FloatArray, ...]
    """Of each datum: [T] float32, nats, of its targets; 0 where the target is no token."""
    metrics: Mapping[str, float]
    """Names end in :sum, :mean, :max or :min, which say how calls are put together."""


@frozen
class AdamParameters:
    """What a step is taken with: AdamW's, and the largest norm of the gradient (0: no limit)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@frozen
class SavedWeights:
    """Weights that a client saved under a name, of a run of this home."""

    run_id: str
    kind: Literal["weights", "sampler_weights"]
    """`weights` has the optimizer's state too; `sampler_weights` can only be sampled from."""
    name: str

    @property
    def path(self) -> str:
        """Return how clients call it."""
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"

    def check_trainable(self) -> None:
        """Check that a model can be made of it.

        Raises:
            ContractError: for `sampler_weights`.
        """
        if self.kind != "weights":
            raise ContractError(
                f"{self.path} can only be sampled from; load one of tinker://RUN/weights/.., as save_state "
                "makes them"
            )


@frozen
class LoadOrder:
    """A step that trains nothing: it takes saved weights, and their optimizer's state if asked for."""

    source: SavedWeights
    optimizer: bool
    digest: str
    """blake3 of the saved weights, as of a version."""


@frozen_by_identity
class Scores:
    """Log-probabilities of given tokens under one version, at temperature 1."""

    logprobs: FloatArray
    """[P] float32, nats, of each token after those before it; the first is NaN."""
    top_ids: IntArray = field(default_factory=lambda: np.empty((0, 0), dtype=np.int32))
    """[P, K] int32: the most probable tokens of each position, best first; -1 in row 0."""
    top_logprobs: FloatArray = field(default_factory=lambda: np.empty((0, 0), dtype=np.float32))
    """[P, K] float32, nats; NaN in row 0."""
