"""Supervised fine-tuning: its configuration, of which `model` and `learner` are those of a run."""

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from antiphon.core.algorithm import CROSS_ENTROPY
from antiphon.core.config import RunConfig, build_config, read_tree
from antiphon.core.config_errors import sentences
from antiphon.core.config_sections import (
    MOST_TOKENS,
    EnvironmentSection,
    LearnerSection,
    ModelSection,
    RewardSection,
    RolloutSection,
    Section,
)
from antiphon.core.errors import ConfigError
from antiphon.core.sampling_config import EvaluationSection, SamplingSection

MOST_ROWS = 1 << 16
SCORING = ("environment", "evaluation", "sampling", "rollout", "reward")
"""Sections that only say how weights are scored on a task, as a run's do."""
_NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"


class SftRunSection(Section):
    """What the training is called."""

    name: str = Field(default="sft", pattern=_NAME)
    """Its name, the MLflow experiment too: letters a to z, digits, dots, dashes and underscores."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the order of the rows."""


class SftDataSection(Section):
    """What is learned from."""

    train: str | tuple[str, ...] = ()
    """Files of JSON lines, Parquet or Arrow, or `hub:NAME`; a row has `messages` (and `tools`), or `prompt`
    and `completion`."""
    heldout: str | tuple[str, ...] = ()
    """The same, whose loss is measured and that nothing is learned from; none by default."""
    turns: Literal["all", "last"] = "all"
    """Which of the assistant's turns of a conversation are learned."""
    max_tokens: int = Field(default=4096, ge=2, le=MOST_TOKENS)
    """Longest row, in tokens; a longer one is refused."""
    rows_per_step: int = Field(default=32, ge=1, le=MOST_ROWS)
    """Rows of one optimizer update."""
    epochs: int = Field(default=1, ge=1, le=1000)
    """How often each row is learned."""
    heldout_interval: int = Field(default=10, ge=1, le=1 << 20)
    """Steps between two measurements of the held-out loss."""


class SftConfig(Section):
    """A supervised fine-tuning."""

    run: SftRunSection = SftRunSection()
    model: ModelSection = ModelSection()
    learner: LearnerSection = LearnerSection()
    data: SftDataSection = SftDataSection()
    environment: EnvironmentSection | None = None
    """A task of one turn whose held-out prompts the weights are scored on every evaluation.interval steps and
    after the last; none by default. It and the next four are as a run's."""
    evaluation: EvaluationSection = EvaluationSection()
    sampling: SamplingSection = SamplingSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()

    @model_validator(mode="after")
    def _check(self) -> "SftConfig":
        if not self.data.train:
            raise ValueError("data.train names no file; give files of JSON lines or Parquet")
        fields = type(self).model_fields
        unused = [name for name in SCORING if getattr(self, name) != fields[name].default]
        if self.environment is None and unused:
            raise ValueError(f"{unused[0]} has no effect without environment; name a task, or leave it out")
        return self

    def steps(self, rows: int) -> int:
        """Return the updates that this many rows take."""
        return math.ceil(rows * self.data.epochs / self.data.rows_per_step)

    def as_run(self, steps: int, learning_rate: float) -> RunConfig:
        """Return what the learner is told: a run of this many steps with this objective."""
        learner: dict[str, Any] = self.learner.model_dump(mode="json") | {"learning_rate": learning_rate}
        run = {"name": self.run.name, "seed": self.run.seed, "steps": steps}
        model = self.model.model_dump(mode="json")
        return build_config(
            {"run": run, "model": model, "learner": learner, "algorithm": {"objective": CROSS_ENTROPY}}
        )

    def as_evaluation(self) -> RunConfig:
        """Return what says how weights are scored on `environment`, which is given."""
        tree: dict[str, Any] = {name: getattr(self, name).model_dump(mode="json") for name in SCORING}
        run = {"name": self.run.name, "seed": self.run.seed}
        return build_config(
            tree | {"run": run, "model": self.model.model_dump(mode="json"), "loop": {"prompts_per_step": 1}}
        )


def load_sft_config(path: Path, overrides: list[str] | None = None) -> SftConfig:
    """Read a YAML file, apply overrides such as `data.epochs=2`, and check the result.

    Raises:
        ConfigError: with one sentence that names the field and the fix.
    """
    try:
        config = SftConfig.model_validate(read_tree(path, overrides))
    except ValidationError as error:
        raise ConfigError(sentences(error, SftConfig)) from error
    if config.model.renderer not in ("auto", "default"):  # recorded ones are still replayed
        raise ConfigError(
            f"model.renderer={config.model.renderer} has no effect on rows: the model's chat template writes "
            "them; leave it out"
        )
    return config
