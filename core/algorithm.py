"""Algorithm: the section of the configuration that says what a learner step minimises.

Each objective has clips of its own. Combinations that mean nothing are refused, and keys that cannot act
with the others are named by `idle_keys`. Formulas and sources: docs/concepts/objectives.md.
"""

from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from antiphon.core.config_sections import Section

CLIPS: dict[str, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
}
"""Objective -> its own `clip_low` and `clip_high`. cispo has no lower clip: no ratio is below 0."""

CROSS_ENTROPY = "cross_entropy"
"""The objective of `antiphon sft`: no policy sampled what is learned, so that no run has it."""

FILTER_BOUNDS: dict[str, tuple[float, float]] = {"sequence": (0.5, 2.0), "geometric": (0.99, 1.01)}
"""Level of a sequence filter -> its own `sequence_filter_low` and `sequence_filter_high`."""

UNREACHED_CAP = 1.1
"""A geometric mean over a trajectory's tokens hardly ever comes so far from 1."""

_SAME_UNCLIPPED = {"gspo": "grpo", "cispo": "dapo"}
"""Objectives that differ from another by how the ratio is taken or clipped, and by nothing else."""

_OF_LOSS = (
    *("clip_low", "clip_high", "dual_clip", "decoupled"),
    *("correction", "correction_level", "correction_cap", "correction_floor"),
    *("sequence_filter", "sequence_filter_low", "sequence_filter_high"),
)
_OF_ADVANTAGES = ("baseline", "normalise_advantages", "deviation")


class AlgorithmSection(Section):
    """The objective of a learner step."""

    objective: str = "dapo"
    """Policy-gradient loss, how ratios are clipped and tokens are averaged: `grpo`, `dapo`, `dr_grpo`,
    `gspo`, `cispo`, or one's own as `package.module:function`; see docs/guides/own-objective.md."""
    advantage: str | None = None
    """What a reward is worth beside the others. null: `baseline`, `normalise_advantages` and `deviation` say;
    or one's own as `package.module:function`; see docs/guides/own-objective.md."""
    clip_low: float | None = Field(default=None, ge=0.0, le=1.0)
    """Lower clip: ratios below 1 - clip_low get no gradient where the advantage is negative. null: the
    objective's own (grpo, dapo, dr_grpo 0.2; gspo 0.0003); cispo has none."""
    clip_high: float | None = Field(default=None, ge=0.0)
    """Upper clip: ratios above 1 + clip_high get no gradient where the advantage is positive; for cispo the
    cap is 1 + clip_high. null: the objective's own (grpo, dr_grpo 0.2; dapo 0.28; gspo 0.0004; cispo 4)."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Ratios above this get no gradient where the advantage is negative either: a token's loss is at most
    dual_clip times |advantage|; null has no such bound."""
    decoupled: bool = True
    """Clip against the policy at the start of the step; its difference to the behaviour policy becomes an
    importance weight (decoupled objective)."""
    correction: Literal["none", "truncate", "mask"] = "truncate"
    """Importance weight of stale or mismatched tokens: ignored, truncated at correction_cap, or
    masked outside [correction_floor, correction_cap]."""
    correction_level: Literal["token", "sequence", "geometric"] | None = None
    """What one weight is of: a token, a trajectory (the product over its tokens), or a trajectory by the
    geometric mean. null: token, for gspo geometric."""
    correction_cap: float = Field(default=2.0, gt=0.0)
    """Largest importance weight."""
    correction_floor: float = Field(default=0.5, ge=0.0)
    """Smallest importance weight that correction=mask keeps."""
    sequence_filter: Literal["sequence", "geometric"] | None = None
    """Whole trajectories that get no gradient, beside what correction does: those whose importance weight at
    this level, as of correction_level, is outside [sequence_filter_low, sequence_filter_high]; null: none."""
    sequence_filter_low: float | None = Field(default=None, ge=0.0, le=1.0)
    """Smallest weight of a trajectory that is kept. null: 0.5, for geometric 0.99."""
    sequence_filter_high: float | None = Field(default=None, ge=1.0, le=1e8)
    """Largest weight of a trajectory that is kept. null: 2, for geometric 1.01."""
    entropy_bonus: float = Field(default=0.0, ge=0.0, le=1.0)
    """The loss of a token falls by this times the entropy, in nats, of the distribution that the learner
    predicts it from; the output head then works once more. 0: no bonus."""
    divisor: Literal["sampled", "trained"] = "sampled"
    """What the loss is divided by. sampled: also what loop.filter=drop left out, so that the filter changes
    the work of a step and not its update; trained: what is in the batch."""
    baseline: Literal["mean", "leave_one_out", "batch"] = "mean"
    """What a reward is compared with: the mean of its group, of the group's others (RLOO), or of the whole
    batch (REINFORCE++)."""
    normalise_advantages: bool = True
    """Divide advantages by a standard deviation (dr_grpo never does)."""
    deviation: Literal["group", "batch"] = "group"
    """Whose standard deviation that is: the rewards' of a group, or all advantages' of the batch, so that a
    group of almost equal rewards gets no huge advantages (REINFORCE++)."""
    truncated_completions: Literal["train", "mask_loss", "mask"] = "train"
    """Completions that sampling.max_tokens cut off. train: like any other; mask_loss: no gradient, but a part
    in their group's baseline and in the divisor (DAPO's overlong filtering); mask: as if they had not been
    sampled."""
    overlong_margin_tokens: int | None = Field(default=None, ge=1, le=1 << 22)
    """DAPO's soft punishment: in this many last tokens before sampling.max_tokens a reward falls linearly by
    overlong_penalty, before advantages are made of it; recorded rewards stay. null: not at all."""
    overlong_penalty: float = Field(default=0.5, gt=0.0)
    """What a completion of sampling.max_tokens loses, in units of the reward. DAPO: half of what lies between
    a wrong and a right answer."""
    updates_per_step: int = Field(default=1, ge=1, le=16)
    """Optimizer updates one batch is split into; with one, and decoupled, no clip can act."""

    @field_validator("objective", "advantage")
    @classmethod
    def _check_name(cls, name: str | None, info: ValidationInfo) -> str | None:
        known_name = info.field_name == "objective" and name in (*CLIPS, CROSS_ENTROPY)
        if name is not None and ":" not in name and not known_name:
            known = f"{', '.join(CLIPS)}, or " if info.field_name == "objective" else ""
            raise ValueError(
                f"algorithm.{info.field_name}={name!r} is not possible: it must be {known}"
                "package.module:function of your own"
            )
        return name

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        name, level = self.objective, self.correction_level
        if self.decoupled and self.correction == "mask" and self.correction_floor > self.correction_cap:
            raise ValueError(
                f"algorithm.correction_floor={self.correction_floor:g} is above algorithm.correction_cap="
                f"{self.correction_cap:g}, so that no weight lies between them; lower the floor"
            )
        if name == "gspo" and level == "token":
            raise ValueError(
                "algorithm.correction_level=token does not fit algorithm.objective=gspo, whose ratio is one "
                "of the whole trajectory; use geometric or sequence, or leave it out"
            )
        if self.baseline == "batch" and self.divides_by_deviation and self.deviation == "group":
            raise ValueError(
                "algorithm.baseline=batch does not fit algorithm.deviation=group, which is that of rewards "
                "around the mean of their group; set algorithm.deviation=batch"
            )
        if name == "cispo":
            self._check_cispo()
        elif not self.own_objective and self.dual_clip is not None and self.dual_clip <= 1.0 + self.clips[1]:
            raise ValueError(
                f"algorithm.dual_clip={self.dual_clip:g} is not above 1 + clip_high = "
                f"{1.0 + self.clips[1]:g}, where positive advantages are clipped; raise it (3 is usual)"
            )
        return self

    def _check_cispo(self) -> None:
        if self.correction_level in ("sequence", "geometric"):
            raise ValueError(
                f"algorithm.correction_level={self.correction_level} does not fit algorithm.objective=cispo, "
                "which caps weights token by token; use token, or leave it out"
            )
        for key in ("clip_low", "dual_clip"):
            if getattr(self, key) is not None:
                raise ValueError(
                    f"algorithm.{key}={getattr(self, key):g} cannot act with algorithm.objective=cispo: "
                    "its one cap, 1 + clip_high, is for all tokens; leave it out"
                )

    @property
    def own_objective(self) -> bool:
        """Return whether the objective is a function of the user's, to which no other key of it applies."""
        return ":" in self.objective

    @property
    def clips(self) -> tuple[float, float]:
        """Return the lower and the upper clip in force, as distances from a ratio of 1."""
        low, high = CLIPS.get(self.objective, (0.0, 0.0))  # one's own has none
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def weight_level(self) -> Literal["token", "sequence", "geometric"]:
        """Return what one importance weight is of."""
        return self.correction_level or ("geometric" if self.objective == "gspo" else "token")

    @property
    def filter_bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest weight of a trajectory that the sequence filter keeps."""
        low, high = FILTER_BOUNDS[self.sequence_filter or "sequence"]
        return (
            low if self.sequence_filter_low is None else self.sequence_filter_low,
            high if self.sequence_filter_high is None else self.sequence_filter_high,
        )

    @property
    def divides_by_deviation(self) -> bool:
        """Return whether advantages are divided by a standard deviation."""
        return self.normalise_advantages and self.objective != "dr_grpo"

    def idle_keys(self) -> list[str]:
        """Return a sentence for every choice that cannot act with the others.

        >>> AlgorithmSection(correction="none", correction_cap=4.0).idle_keys()
        ['algorithm.correction_cap cannot act with algorithm.correction=none; leave it out']
        """
        found = []
        owned = {"objective": _OF_LOSS if self.own_objective else (), "advantage": _OF_ADVANTAGES}
        for own, names in owned.items():
            keys = [key for key in names if self._set(key)]
            if keys and (name := getattr(self, own)):
                found.append(
                    f"{_names(keys)} cannot act with algorithm.{own}={name}; leave {_them(keys)} out"
                )
        if self.advantage is None and self.baseline == "leave_one_out" and self.divides_by_deviation:
            found.append(
                "algorithm.baseline=leave_one_out only scales all advantages where they are divided by the "
                "group's deviation; set algorithm.normalise_advantages=false"
            )
        if self.advantage is None and self.deviation == "batch" and not self.divides_by_deviation:
            why = "objective=dr_grpo" if self.normalise_advantages else "normalise_advantages=false"
            found.append(f"algorithm.deviation cannot act with algorithm.{why}; leave it out")
        if self.overlong_margin_tokens is None and self._set("overlong_penalty"):
            found.append(
                "algorithm.overlong_penalty cannot act without algorithm.overlong_margin_tokens; leave it out"
            )
        if self.own_objective:
            return found
        if self.decoupled and self.updates_per_step == 1:
            why = "with algorithm.updates_per_step=1 and algorithm.decoupled=true every ratio is 1"
            fix = "take several updates (examples/clipped_updates.yaml) or algorithm.decoupled=false"
            keys = [key for key in ("clip_low", "clip_high", "dual_clip") if getattr(self, key) is not None]
            if keys:
                found.append(f"{_names(keys)} cannot act: {why}; {fix}")
            if self.objective in _SAME_UNCLIPPED:
                found.append(
                    f"algorithm.objective={self.objective} does not differ from "
                    f"{_SAME_UNCLIPPED[self.objective]} but by its weights: {why}; {fix}"
                )
            unbounded = self.weight_level == "geometric" and self.correction_cap >= UNREACHED_CAP
            if unbounded and self.sequence_filter is None:
                found.append(
                    "nothing bounds a step on stale data: no clip acts, and a geometric mean hardly ever "
                    f"reaches algorithm.correction_cap={self.correction_cap:g}; set that to 1.01 or so, or "
                    "take several updates (examples/gspo.yaml)"
                )
        filters = ("sequence_filter_low", "sequence_filter_high")
        if self.decoupled and self.sequence_filter is None and (keys := [*filter(self._set, filters)]):
            found.append(
                f"{_names(keys)} cannot act without algorithm.sequence_filter; leave {_them(keys)} out"
            )
        keys = [key for key in ("correction_level", "correction_cap", "correction_floor") if self._set(key)]
        if not self.decoupled:
            keys += [key for key in ("correction", "sequence_filter", *filters) if self._set(key)]
            without = "algorithm.decoupled=false"
        elif self.correction == "none":
            without = "algorithm.correction=none"
        else:
            keys = [key for key in keys if key == "correction_floor" and self.correction == "truncate"]
            without = "algorithm.correction=truncate"
        if keys:
            found.append(f"{_names(keys)} cannot act with {without}; leave {_them(keys)} out")
        return found

    def _set(self, key: str) -> bool:
        return bool(getattr(self, key) != type(self).model_fields[key].default)


def _them(keys: list[str]) -> str:
    return "them" if keys[1:] else "it"


def _names(keys: list[str]) -> str:
    """Spell several keys as one subject.

    >>> _names(["clip_low", "clip_high"])
    'algorithm.clip_low and algorithm.clip_high'
    """
    *others, last = [f"algorithm.{key}" for key in keys]
    return f"{', '.join(others)} and {last}" if others else last
