"""Offers: what a run can rent, and what is known of its task: the YAML file of `antiphon plan --offers`."""

from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from antiphon.core.config_errors import read_yaml, sentences
from antiphon.core.config_sections import Section
from antiphon.core.errors import ConfigError, InfeasibleError

MOST_USD_PER_GPU_HOUR = 100.0
"""Nobody asks more for one GPU."""
_BYTES_PER_MBIT = 1e6 / 8


class LearnerOffer(Section):
    """The machine of the learner and the other services."""

    gpu: str | None = None
    """Class of its GPUs, such as H200; not needed where train_s is known."""
    gpus: int = Field(default=1, ge=1, le=65536)
    usd_per_hour: float | None = None
    """Price of all of it."""
    train_s: float | None = Field(default=None, gt=0.0, lt=1e7)
    """Measured seconds of one learner step."""
    up_mbit_per_s: float = Field(default=1000.0, gt=0.0)
    down_mbit_per_s: float = Field(default=1000.0, gt=0.0)


class WorkerClass(Section):
    """Workers that are alike."""

    name: str = Field(min_length=1)
    gpu: str | None = None
    gpus: int = Field(default=1, ge=1, le=1024)
    """GPUs of one worker."""
    usd_per_hour: float | None = None
    """Price of one worker."""
    most: int = Field(default=64, ge=1, le=4096)
    """How many can be had."""
    zones: int = Field(default=1, ge=1, le=256)
    """Zones that they are spread over; one may be reclaimed at once."""
    tokens_per_s: float | None = Field(default=None, gt=0.0, lt=1e9)
    """Measured tokens per second of one worker; null estimates them."""
    losses_per_hour: float = Field(default=0.0, ge=0.0, le=3600.0)
    """Sudden ends of one worker per hour of its life."""
    replaced_s: float = Field(default=600.0, ge=0.0)
    """Seconds until another one samples in its place."""
    up_mbit_per_s: float = Field(default=1000.0, gt=0.0)
    down_mbit_per_s: float = Field(default=1000.0, gt=0.0)


class TaskFacts(Section):
    """What completions are like."""

    prompt_tokens: float = Field(default=300.0, ge=0.0)
    completion_tokens: float | None = Field(default=None, gt=0.0)
    """Mean length; null takes a half of sampling.max_tokens."""
    spread: float = Field(default=0.5, ge=0.0, le=3.0)
    """Standard deviation of the logarithm of the lengths of a group."""
    acceptance: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of completions trained on, after filtering."""
    reward_s: float = Field(default=1.0, ge=0.0)
    """Seconds from a group's last token to its rewards."""


class Offers(Section):
    """Everything that a plan needs besides the configuration."""

    model: str | None = None
    """The model by its name on the hub; null takes model.path."""
    parameters: float | None = Field(default=None, gt=0.0)
    """Parameters of a model that has no entry."""
    active_parameters: float | None = Field(default=None, gt=0.0)
    cache_bytes_per_token: float | None = Field(default=None, gt=0.0)
    weight_bytes: float = Field(default=2.0, gt=0.0, le=8.0)
    """Bytes per parameter in the engines: 2 for bfloat16, 1 for fp8."""
    payload_share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Bytes of a published version over those of all weights: 1 without patches; with them see
    docs/concepts/patches.md."""
    egress_usd_per_gb: float = Field(default=0.0, ge=0.0, le=10.0)
    learner: LearnerOffer = LearnerOffer()
    workers: tuple[WorkerClass, ...] = ()
    task: TaskFacts = TaskFacts()

    @model_validator(mode="after")
    def _check(self) -> Self:
        priced = [("learner", self.learner.usd_per_hour, self.learner.gpus)]
        priced += [(f"workers {one.name}", one.usd_per_hour, one.gpus) for one in self.workers]
        for name, price, gpus in priced:
            if price is None:
                raise ValueError(
                    f"{name} has no usd_per_hour; give its price in US dollars per hour, 0 for a "
                    "machine of your own"
                )
            if not 0.0 <= price <= MOST_USD_PER_GPU_HOUR * gpus:
                raise ValueError(
                    f"{name} costs usd_per_hour={price:g}; a price is from 0 to "
                    f"{MOST_USD_PER_GPU_HOUR * gpus:g} for {gpus} GPU(s), so look at its unit"
                )
        names = [one.name for one in self.workers]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"workers {twice} stand there twice; give each class a name of its own")
        return self


def load_offers(path: Path) -> Offers:
    """Read a file of offers.

    Raises:
        ConfigError: when it cannot be read or is no YAML.
        InfeasibleError: when its numbers cannot be planned with.
    """
    try:
        tree = read_yaml(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise ConfigError(f"there are no offers at {path}; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    return build_offers(tree, str(path))


def build_offers(tree: dict[str, Any], name: str = "the offers") -> Offers:
    """Check plain values and freeze them.

    Raises:
        InfeasibleError: with one sentence per wrong field.
    """
    try:
        return Offers.model_validate(tree)
    except ValidationError as error:
        raise InfeasibleError(f"{name}: {sentences(error, Offers)}") from error


def bytes_per_s(mbit_per_s: float) -> float:
    """Return a link's rate in bytes per second."""
    return mbit_per_s * _BYTES_PER_MBIT
