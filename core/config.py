"""RunConfig: one YAML file, one frozen tree, checked before anything starts.

Every field has a doc string; `docs/configuration.md` is generated from them. The unit is in
the name. What can be computed from other fields is a function elsewhere, never a field.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError, model_validator

from antiphon.core.algorithm import AlgorithmSection
from antiphon.core.broadcast.config import BroadcastSection
from antiphon.core.capacity.provisioning_config import ProvisioningSection
from antiphon.core.client_records import CLIENT
from antiphon.core.config_errors import LOADER, read_yaml, sentences
from antiphon.core.config_sections import (
    FILE,
    HOST,
    JUDGE,
    CoordinatorSection,
    EnvironmentSection,
    GatewaySection,
    LearnerSection,
    LoopSection,
    ModelSection,
    RecordSection,
    RewardSection,
    RolloutSection,
    RunSection,
    Section,
    ServicesSection,
    TrustSection,
)
from antiphon.core.door_config import DoorSection
from antiphon.core.drafting.config import DraftingSection
from antiphon.core.errors import ConfigError
from antiphon.core.judge_config import JudgeSection
from antiphon.core.message_sizes import MARGIN_BYTES, MESSAGE_BYTES, fits, group_bytes
from antiphon.core.records import TurnLimits
from antiphon.core.reference_config import ReferenceSection
from antiphon.core.sampling_config import EvaluationSection, Rule, SamplingSection

_ROOT = Path(__file__).resolve().parents[1]
"""The checkout, or where the package is installed: examples/ lies in both."""
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class RunConfig(Section):
    """Everything a run depends on."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    environment: EnvironmentSection = EnvironmentSection()
    gateway: GatewaySection = GatewaySection()
    reward: RewardSection = RewardSection()
    judge: JudgeSection = JudgeSection()
    reference: ReferenceSection = ReferenceSection()
    loop: LoopSection = LoopSection()
    sampling: SamplingSection = SamplingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    rollout: RolloutSection = RolloutSection()
    provisioning: ProvisioningSection = ProvisioningSection()
    drafting: DraftingSection = DraftingSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    broadcast: BroadcastSection = BroadcastSection()
    evaluation: EvaluationSection = EvaluationSection()
    record: RecordSection = RecordSection()
    trust: TrustSection = TrustSection()
    services: ServicesSection = ServicesSection()
    door: DoorSection = DoorSection()

    @property
    def planned_steps(self) -> int | None:
        """Return how many steps the run has; None where its client decides."""
        return None if self.client_driven else self.run.steps

    @property
    def client_driven(self) -> bool:
        """Return whether prompts and steps come from a client, which takes rewards into its own loop."""
        return self.environment.name == CLIENT

    @property
    def scores_earlier(self) -> bool:
        """Return whether the learner scores tokens under earlier versions, of which engines said nothing."""
        return self.rollout.logprobs == "learner" and self.loop.max_staleness > 0

    @property
    def turn_limits(self) -> TurnLimits:
        """Return how long a trajectory may become where the environment answers turns."""
        most, room = self.environment.max_trajectory_tokens, self.rollout.max_model_tokens
        if self.environment.name == HOST:  # a row's branches each have all of the engine's room
            return TurnLimits(self.environment.max_turns, most or room)
        return TurnLimits(self.environment.max_turns, min(most or room, room))

    def price_of(self, worker: str, at: float) -> tuple[str, float]:
        """Return the class of a worker by its name ("": none of the pool) and US dollars per hour.

        The price is that of a moment, `at` in Unix seconds.
        """
        found = self.provisioning.class_of(worker)
        return (found.name, found.usd_at(at)) if found else ("", self.record.worker_usd_per_hour)

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        loop = self.loop
        if loop.max_staleness < loop.publish_interval - 1:
            # The newest snapshot is up to publish_interval - 1 versions behind the step that trains, so
            # a smaller bound would wait for a version that is never published.
            raise ValueError(
                f"loop.publish_interval={loop.publish_interval} needs loop.max_staleness >= "
                f"{loop.publish_interval - 1}, but it is {loop.max_staleness}; "
                "raise the bound or publish more often"
            )
        if loop.mode == "fixed" and self.sampling.sampler != "keyed":
            raise ValueError(
                f"sampling.sampler={self.sampling.sampler} cannot repeat a run in loop.mode=fixed; "
                "use sampling.sampler=keyed"
            )
        if self.rollout.swap_cache == "keep" and loop.mode == "fixed":
            raise ValueError(
                "rollout.swap_cache=keep cannot act with loop.mode=fixed, which swaps weights only when no "
                "request runs; leave it out, or use loop.mode=elastic"
            )
        if self.rollout.swap_cache == "keep" and loop.max_staleness < loop.publish_interval:
            raise ValueError(
                f"rollout.swap_cache=keep cannot act with loop.max_staleness={loop.max_staleness}: a sample "
                f"that spans a swap is loop.publish_interval={loop.publish_interval} versions old when it "
                "trains, so none could; leave it out, or raise the bound"
            )
        margin, most = self.algorithm.overlong_margin_tokens, self.sampling.max_tokens
        if margin is not None and margin >= most:
            raise ValueError(
                f"algorithm.overlong_margin_tokens={margin} leaves no length unpunished, since sampling."
                f"max_tokens={most}; lower it (DAPO: a fifth of that)"
            )
        if self.algorithm.baseline == "batch" and self.algorithm.advantage is None and loop.filter != "none":
            raise ValueError(
                f"algorithm.baseline=batch learns from groups whose rewards are all equal too, which loop."
                f"filter={loop.filter} leaves out; set loop.filter=none, or use another baseline"
            )
        if loop.accept_uneven and loop.mode != "fixed":
            raise ValueError(
                f"loop.accept_uneven=true has no effect with loop.mode={loop.mode}, which takes uneven "
                "engines in any case; leave it out, or use loop.mode=fixed"
            )
        if self.sampling.max_tokens >= self.rollout.max_model_tokens:
            raise ValueError(
                f"sampling.max_tokens={self.sampling.max_tokens} leaves no room for a prompt in "
                f"rollout.max_model_tokens={self.rollout.max_model_tokens}; raise the latter"
            )
        samples, held = loop.group_size, self.evaluation.samples
        name = "loop.group_size" if samples >= held else "evaluation.samples"
        samples = max(samples, held)
        group = group_bytes(samples, samples * self.sampling.max_tokens, self.rollout.max_model_tokens)
        if not fits(group):
            raise ValueError(
                f"{name}={samples} times sampling.max_tokens={self.sampling.max_tokens} "
                f"makes groups of up to {group / (1 << 20):.1f} MiB, but one message carries at most "
                f"{(MESSAGE_BYTES - MARGIN_BYTES) >> 20} MiB; lower either"
            )
        for key, count in (
            ("loop.group_size", loop.group_size),
            ("evaluation.samples", self.evaluation.samples),
        ):
            if count % self.environment.seats:
                raise ValueError(
                    f"{key}={count} is no multiple of environment.seats={self.environment.seats}, and an "
                    "episode fills all its seats; set it to a multiple"
                )
        if self.environment.name != HOST and self.gateway != GatewaySection():
            raise ValueError(
                f"gateway has no effect with environment.name={self.environment.name}; leave it out, or use "
                f"environment.name={HOST}"
            )
        rollout, ranks = self.rollout, self.learner.ranks
        if self.learner.devices and len(self.learner.devices) != ranks:
            raise ValueError(
                f"learner.devices={list(self.learner.devices)} names {len(self.learner.devices)} GPUs for "
                f"learner.ranks={ranks}; name one for each rank"
            )
        sizes = [len(one) for one in rollout.devices]
        if sizes and sizes != [rollout.tensor_parallel] * rollout.workers:
            raise ValueError(
                f"rollout.devices names GPUs for {len(sizes)} workers, {sizes} each; name rollout."
                f"tensor_parallel={rollout.tensor_parallel} for each of rollout.workers={rollout.workers}"
            )
        if rollout.graphs == "piecewise" and not rollout.compiled:
            raise ValueError(
                "rollout.graphs=piecewise needs the parts that rollout.compiled=true makes; set both, or use "
                "rollout.graphs=full"
            )
        warmup = self.learner.warmup_steps
        if warmup is not None and warmup >= self.run.steps:
            raise ValueError(
                f"learner.warmup_steps={warmup} is no shorter than run.steps={self.run.steps}, so that the "
                "learning rate is never reached; lower it, or leave it out"
            )
        if self.algorithm.updates_per_step > loop.prompts_per_step:
            raise ValueError(
                f"algorithm.updates_per_step={self.algorithm.updates_per_step} needs as many groups, but "
                f"loop.prompts_per_step={loop.prompts_per_step}; lower the former"
            )
        if self.evaluation.prompts > self.environment.heldout_size and not self.client_driven:
            raise ValueError(
                f"evaluation.prompts={self.evaluation.prompts} exceeds "
                f"environment.heldout_size={self.environment.heldout_size}; lower the former"
            )
        if loop.prompts_per_step > self.environment.train_size and not self.client_driven:
            raise ValueError(
                f"loop.prompts_per_step={loop.prompts_per_step} exceeds "
                f"environment.train_size={self.environment.train_size}; raise the latter"
            )
        if self.broadcast.snapshots_kept < loop.max_staleness + 2:
            raise ValueError(
                f"broadcast.snapshots_kept={self.broadcast.snapshots_kept} must be at least "
                f"loop.max_staleness + 2 = {loop.max_staleness + 2}; raise it"
            )
        return self

    @model_validator(mode="after")
    def _check_client(self) -> Self:
        if not self.client_driven:
            return self
        for key, wrong, fix in (
            ("loop.mode", self.loop.mode != "elastic", "set it to elastic"),
            ("loop.publish_interval", self.loop.publish_interval != 1, "set it to 1"),
            ("reference", self.reference.used, "leave it out"),
            ("judge", bool(self.judge.url), "leave it out"),
            ("rollout.logprobs", self.rollout.logprobs != "engine", "set it to engine: they are given away"),
            # Engines hand in zeros then, and the client would take them for log-probabilities.
            ("rollout.logprobs", self.rollout.logprobs == "learner", "leave it out: its losses need them"),
        ):
            if wrong:
                raise ValueError(
                    f"{key} cannot act so with environment.name={CLIENT}, whose prompts, rewards and steps "
                    f"come from a client; {fix}"
                )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        rollout, url = self.rollout, self.rollout.engine_url
        if rollout.logprobs == "learner":
            if self.scores_earlier and self.learner.ranks > 1:
                raise ValueError(
                    "rollout.logprobs=learner scores tokens under earlier versions on one rank alone, but "
                    f"loop.max_staleness={self.loop.max_staleness} and learner.ranks={self.learner.ranks}; "
                    "set the former to 0 or the latter to 1"
                )
            if self.scores_earlier and rollout.swap_cache == "keep":
                raise ValueError(
                    "rollout.swap_cache=keep has tokens sampled over caches of older weights, whose "
                    "log-probabilities rollout.logprobs=learner cannot compute; set it to recompute"
                )
            if self.trust.audits != "off":
                raise ValueError(
                    f"trust.audits={self.trust.audits} compares log-probabilities that rollout.logprobs="
                    "learner says are not given; set trust.audits=off, and take workers that you know"
                )
            if self.reference.of_rewards:
                raise ValueError(
                    "rollout.logprobs=learner computes log-probabilities after rewards are counted, so "
                    "that reference.kl has none to compare; use reference.kl_place=loss"
                )
        engine, peer = rollout.engine, rollout.engine_peer
        for name, given, takers in (
            ("engine_url", url, "http or parallax"),
            ("engine_folder", rollout.engine_folder, "http or parallax"),
            ("engine_peer", peer, "parallax"),
        ):
            if given and engine not in takers:
                raise ValueError(
                    f"rollout.{name} has no effect with rollout.engine={engine}; leave it out, or use "
                    f"rollout.engine={takers}"
                )
        if engine == "vllm":
            return self
        if not re.fullmatch(r"https?://[^/\s?#@]+/?", url):
            raise ValueError(
                f"rollout.engine_url={url!r} names no server, but rollout.engine={engine} needs one; write "
                "http://HOST:PORT"
            )
        if self.sampling.sampler != "native":
            raise ValueError(
                f"rollout.engine={engine} draws by the server's own sampler, which has no position keys; set "
                "sampling.sampler=native and loop.mode=elastic"
            )
        if engine == "parallax" and not re.fullmatch(r"/(ip[46]|dns[46]?)/[^/\s]+/tcp/\d+/p2p/\w+", peer):
            raise ValueError(
                f"rollout.engine_peer={peer!r} names no peer, through which rollout.engine=parallax gets its "
                "weights; write /ip4/ADDRESS/tcp/PORT/p2p/ID of Parallax's scheduler"
            )
        if engine == "parallax" and rollout.logprobs != "learner":
            raise ValueError(
                "rollout.engine=parallax gives no log-probabilities; set rollout.logprobs=learner and "
                "trust.audits=off"
            )
        if rollout.workers > 1:
            raise ValueError(
                f"rollout.workers={rollout.workers} workers would swap the weights of one server, "
                f"rollout.engine_url={url}, against one another; set rollout.workers=1"
            )
        if rollout.swap_cache == "keep":
            raise ValueError(
                f"rollout.swap_cache=keep cannot act with rollout.engine={engine}, which aborts requests at "
                "a swap and sends them again; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_judge(self) -> Self:
        name, score = self.environment.name, self.environment.parameters.get("score")
        there = bool(self.judge.url)
        if (name == HOST and there) or (name == FILE and there != (score == JUDGE)):
            raise ValueError(
                f"judge.url {'is' if there else 'is not'} set, but environment.name={name} has "
                f"environment.parameters.score={score}; a judge goes with score={JUDGE} of {FILE}, or "
                "with an environment of one turn that is no host: set both, or neither"
            )
        return self

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        section = self.reference
        if section.used and self.environment.name == HOST:
            raise ValueError(
                f"reference has no effect with environment.name={HOST}, whose trajectories have turns; "
                "leave it out, or use an environment of one turn"
            )
        if section.distillation and self.loop.filter != "none":
            raise ValueError(
                f"loop.filter={self.loop.filter} leaves out groups whose rewards are equal, from which "
                "reference.distillation learns too; set loop.filter=none"
            )
        if section.distillation and self.algorithm.own_objective:
            raise ValueError(
                f"algorithm.objective={self.algorithm.objective} takes one advantage of a trajectory, and "
                "reference.distillation makes one of each token; leave either out"
            )
        if section.url and self.sampling.temperature not in (0.0, 1.0):
            raise ValueError(
                f"sampling.temperature={self.sampling.temperature:g}, but the server of reference.url "
                "answers at temperature 1; sample at 1, or give reference.model a folder without a url"
            )
        return self

    @model_validator(mode="after")
    def _check_retention(self) -> Self:
        record, interval = self.record, self.loop.publish_interval
        every, kept = record.anchor_every, f"record.weights={record.weights}"
        if every is not None and record.weights != "anchors":
            raise ValueError(
                f"record.anchor_every={every} has no effect with {kept}; set record.weights=anchors, or "
                "leave it out"
            )
        if every is not None and every % interval:
            raise ValueError(
                f"record.anchor_every={every} is no multiple of loop.publish_interval={interval}, so that "
                "most anchors would never be published; take a multiple"
            )
        if record.weights != "all" and not record.dvc:
            raise ValueError(
                f"{kept} has no effect with record.dvc=false, where the best and the newest weights are "
                "kept; leave it out"
            )
        if record.weights != "all" and record.checkpoint_stride == 0:
            raise ValueError(
                f"{kept} makes the other versions again from pinned checkpoints, but "
                "record.checkpoint_stride=0 pins none; set it to 1 or more, or keep all weights"
            )
        return self

    def idle_keys(self) -> tuple[str, ...]:
        """Return a sentence for every key that was set and cannot act with the others."""
        return (*self.algorithm.idle_keys(), *self.learner.idle_keys())


def load_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file, apply overrides such as `loop.max_staleness=4`, and check the result.

    Raises:
        ConfigError: with one sentence that names the field and the fix.
    """
    tree = read_tree(path, overrides)
    if overrides is not None and (order := _retired_order(tree)):  # it was written by hand
        raise ConfigError(
            f"loop.order={order} is no order any more; write loop.order=by_length, which takes the longest "
            "first at S=0 and alternates at S>=1, where remembered lengths predict"
        )
    return build_config(tree)


def read_tree(path: Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """Read a YAML file of sections and apply overrides; its fields are not checked.

    A file of examples/ that is not in this folder is the shipped one.

    Raises:
        ConfigError: with one sentence that names the field and the fix.
    """
    if path.parts[:1] == ("examples",) and not path.exists() and (shipped := _ROOT / path).exists():
        path = shipped
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file at {path}; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {said}; give the path of a YAML file") from error
    try:
        tree = read_yaml(text) or {}
    except yaml.YAMLError as error:
        said = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
        raise ConfigError(f"{path} is not valid YAML: {said}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections, such as run and loop, each with its fields below it")
    for override in overrides or []:
        apply_override(tree, override)
    return tree


def build_config(tree: dict[str, Any]) -> RunConfig:
    """Check a tree of plain values and freeze it; what an older run recorded is read as today's.

    Raises:
        ConfigError: with one sentence per wrong field.
    """
    if _retired_order(tree):
        tree = {**tree, "loop": {**tree["loop"], "order": ORDER_OF_RETIRED}}
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(sentences(error, RunConfig)) from error


RETIRED_ORDERS, ORDER_OF_RETIRED = ("auto", "longest_first", "alternating", "two_tier"), "by_length"
"""Values of `loop.order` in runs of older versions, and what they are read as."""


def _retired_order(tree: Any) -> str | None:
    loop = tree.get("loop") if isinstance(tree, dict) else None
    order = loop.get("order") if isinstance(loop, dict) else None
    return order if order in RETIRED_ORDERS else None


@functools.lru_cache(maxsize=8)
def parse_config(text: str) -> RunConfig:
    """Read what `dump_config` wrote; the same text gives the same frozen tree.

    Raises:
        ConfigError: with one sentence per wrong field.
    """
    return build_config(yaml.load(text, Loader=LOADER) or {})


def with_rule(config: RunConfig, rule: Rule) -> RunConfig:
    """Return the configuration with the rule that was decided in place of `sampling.rule: auto`.

    vLLM's own sampler has none.
    """
    if config.sampling.sampler == "native":
        return config
    return config.model_copy(update={"sampling": config.sampling.model_copy(update={"rule": rule})})


def dump_config(config: RunConfig) -> str:
    """Return the resolved tree as YAML; reading it back gives an equal tree."""
    return _as_yaml(config.model_dump_json())


@functools.lru_cache(maxsize=16)
def _as_yaml(text: str) -> str:
    """Return a tree given as JSON as YAML; writing YAML takes a hundred times as long as writing JSON."""
    return str(yaml.dump(json.loads(text), Dumper=_DUMPER, sort_keys=False, allow_unicode=True))


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set what an override such as `loop.max_staleness=4` says in a tree.

    Raises:
        ConfigError: when it is of another form.
    """
    key, equals, raw = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {override!r} is not of the form key=value; write loop.max_staleness=2")
    try:
        value = read_yaml(raw, key) if raw else ""
    except yaml.YAMLError:
        raise ConfigError(f"override {key}: {raw!r} is not a valid YAML value; quote it") from None
    *path, leaf = key.split(".")
    node = tree
    for part in path:
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {key}: {part} is a value, not a section; see `antiphon config`")
        node = child
    node[leaf] = value
