"""Door config: how loops that users write themselves are served."""

from typing import Literal

from pydantic import Field

from antiphon.core.config_sections import MOST_ADAPTER_RANK, MOST_STEPS, YEAR_S, Section


class DoorSection(Section):
    """The front door: where clients of Tinker's wire sample and train (`antiphon door`)."""

    address: str = "127.0.0.1"
    """Address to listen on; anything but loopback is encrypted and needs `services.credentials`."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port; 0 picks a free one, which the command prints."""
    base_models: tuple[str, ...] = Field(default=(), max_length=64)
    """Further names by which clients may call the model of model.path, such as Qwen/Qwen3-8B-Base."""
    weights: Literal["adapters", "full"] = "adapters"
    """What create_model trains: adapters of the rank that the client asks for, or all weights."""
    most_rank: int = Field(default=64, ge=1, le=MOST_ADAPTER_RANK)
    """Largest rank that a client may ask for."""
    models: int = Field(default=1, ge=1, le=64)
    """Models whose services may be up at the same time; each has a learner and rollout.workers engines."""
    max_staleness: int = Field(default=4, ge=0, le=MOST_STEPS)
    """Versions that the oldest token of an inflight session may be behind the newest version."""
    stable_reinforce: Literal["refuse", "ours"] = "refuse"
    """What becomes of the loss stable_reinforce, whose definition is unpublished: refused, or our decoupled
    objective on the log-probabilities and versions that were recorded when the tokens were sampled."""
    session_timeout_s: float = Field(default=120.0, gt=0.0, le=YEAR_S)
    """Seconds without a heartbeat after which a session gives its models' places back; it stays resumable."""
    future_ttl_s: float = Field(default=3600.0, gt=0.0, le=YEAR_S)
    """Seconds after which an answer is forgotten that was told; the client then asks again."""
