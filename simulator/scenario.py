"""Scenario: which run is simulated, with how many processes, how fast they are and what goes wrong.

A scenario comes from a YAML file, or is drawn from a seed: `drawn_scenario` covers both modes, all
filters, small and large bounds, small and large fleets. With a scenario of its own, a seed still
decides every delay and the time and victim of every fault.
"""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from antiphon.core.config import RunConfig, build_config
from antiphon.core.config_errors import read_yaml, sentences
from antiphon.core.config_sections import HOST
from antiphon.core.errors import ConfigError
from antiphon.core.records import TurnLimits
from antiphon.simulator.faults import FaultMix, draw_mix
from antiphon.simulator.hosts import TIMEOUT_S, Manner
from antiphon.simulator.virtual.random_streams import RandomStream


class Scenario(BaseModel):
    """One kind of simulated run."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = "drawn"
    """What reports call it."""
    run: dict[str, Any] = Field(default_factory=dict)
    """The run's configuration, as in a run's own YAML; unsuitable for real models: see `run_config`."""
    workers: int = Field(default=3, ge=1, le=64)
    """Rollout workers."""
    reward_services: int = Field(default=1, ge=1, le=8)
    """Reward services."""
    engine_step_s: tuple[float, float] = (0.1, 0.4)
    """Shortest and longest engine step, which advances every request by a token, seconds."""
    worker_slowness: tuple[float, float] = (0.6, 3.0)
    """Fastest and slowest worker: factors of their engine steps; most are near the fastest."""
    learner_step_s: tuple[float, float] = (0.3, 1.5)
    """Shortest and longest learner step, seconds."""
    slow_chunk_s: float = Field(default=10.0, gt=0.0)
    """What a chunk takes on a slow link, seconds; a finished group takes a fifth of it."""
    reward_rarity: int = Field(default=1, ge=0)
    """Rewards are 1 once in this number + 1, else 0; the higher, the more groups lack variance."""
    failure_rarity: int = Field(default=0, ge=0)
    """One answer in about this number cannot be scored; 0: all can."""
    hostile: bool = False
    """Whether a worker takes part that wants to do harm, see `simulator/hostile_worker.py`."""
    editor: bool = False
    """Whether a worker takes part that changes tokens of what it sampled; not for fixed mode, where what it
    changes and no audit finds is no longer what an undisturbed run samples."""
    faults: FaultMix = FaultMix()
    """What goes wrong."""
    turns: int = Field(default=1, ge=1, le=64)
    """Most turns of a trajectory; from 2 on, environments answer, some of them after a long while."""
    hosts: tuple[Manner, ...] = ()
    """Programs that hold the environment of a run with turns; none: it is the run's own."""
    skips: tuple[int, ...] = ()
    """Steps that an operator skips. In fixed mode the learner cannot train on their batches."""
    limit_s: float = Field(default=2000.0, gt=0.0)
    """Virtual seconds after which the run counts as endless."""
    span_s: float | None = Field(default=None, gt=0.0)
    """Virtual seconds after which the run is stopped as it stands; None: it ends with its last step."""

    @property
    def limits(self) -> TurnLimits | None:
        """Return how long trajectories with turns may be; None where there are none."""
        if self.turns < 2:
            return None
        context = self.run_config().rollout.max_model_tokens if self.hosts else None
        return TurnLimits(self.turns, 36 if self.hosts else 24, context)

    def run_config(self) -> RunConfig:
        """Return the configuration of the simulated run: small by default, then what `run` says.

        Raises:
            ConfigError: when `run` is no configuration.
        """
        tree: dict[str, Any] = {
            "run": {"steps": 4},
            "environment": {"train_size": 12, "heldout_size": 2},
            "evaluation": {"prompts": 2, "interval": 2},
            "loop": {"prompts_per_step": 3, "group_size": 2},
            "sampling": {"max_tokens": 6},
            "rollout": {"concurrent_groups": 2},
            "coordinator": {"payload_retention_steps": 2},
            "services": {"stall_timeout_s": 600.0},
            "reward": {"max_failed_share": 1.0},
        }
        if self.hosts:
            tree["environment"] |= {"name": HOST}
            tree["gateway"] = {"host_timeout_s": TIMEOUT_S}
            tree["services"] = {"stall_timeout_s": 120.0}
        for section, fields in self.run.items():
            known = tree.setdefault(section, {})
            if not isinstance(fields, dict):
                raise ConfigError(f"scenario: run.{section} must be a section of fields, not {fields!r}")
            known.update(fields)
        return build_config(tree)


def load_scenario(path: Path) -> Scenario:
    """Read a scenario from a YAML file.

    Raises:
        ConfigError: when there is no such file, or it is no scenario.
    """
    try:
        scenario = Scenario.model_validate(read_yaml(path.read_text(encoding="utf-8")) or {})
    except OSError as error:
        raise ConfigError(f"cannot read the scenario {path}: {error.strerror}; give a YAML file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        said = sentences(error, Scenario)
        raise ConfigError(f"{path} is no scenario: {said}; see examples/") from error
    scenario.run_config()
    return scenario


def drawn_scenario(seed: int) -> Scenario:
    """Return the scenario that a seed stands for."""
    random = RandomStream("scenario", seed)
    fixed = random.happens(0.4)
    # Duplicates of slow leases need a history of leases that says what is slow.
    long = not fixed and random.happens(0.12)
    bound = random.index(4)
    # Runs of fixed mode are compared with their undisturbed twin; few of them keep that affordable.
    pattern = random.index(12) if fixed else seed
    shape = RandomStream("shape", int(fixed), pattern)
    if fixed:
        bound = shape.index(4)
    # One worker whose versions are old while the others go on: the gate alone keeps its groups in time.
    links = RandomStream("links", seed)
    straggles = not fixed and not long and links.happens(0.15)
    bound = min(bound, 1) if straggles else bound
    ahead = "bound" if straggles else RandomStream("run-ahead", seed).choose(("measured", "bound"))
    scenario = Scenario(
        run={
            "run": {"steps": 7 if long else 3 + shape.index(3), "seed": pattern},
            "loop": {
                "mode": "fixed" if fixed else "elastic",
                "max_staleness": bound,
                "publish_interval": 1 + shape.index(min(2, bound + 1)),
                "filter": shape.choose(("none", "drop", "refill")),
                "prompts_per_step": 4 if long else 2 + shape.index(3),
                "group_size": 2 + shape.index(2),
                # All that the bound allows is what tests the bound; what is measured is what runs do.
                "run_ahead": ahead,
            },
            "evaluation": {
                "prompts": 2,
                "samples": RandomStream("held-out samples", int(fixed), pattern).choose((1, 1, 2, 5)),
                "interval": shape.index(3),
            },
            "rollout": {
                "concurrent_groups": 1 + random.index(3),
                "grace_s": random.choose((2.0, 8.0, 20.0)),
            },
            "learner": {"checkpoint_interval": 1 + random.index(3), "checkpoints_kept": 1 + random.index(2)},
            "coordinator": {
                "lease_s": random.choose((8.0, 15.0, 30.0)),
                "payload_retention_steps": 2,
                "speculation": 0.5 if long else 0.05,
            },
        },
        workers=3 if long else max(1 + random.index(4), 1 + straggles),
        reward_services=1 + random.index(2),
        reward_rarity=shape.choose((1, 1, 2, 5)),
        failure_rarity=RandomStream("failures", int(fixed), pattern).choose((0, 0, 0, 5)),
        engine_step_s=random.choose(((0.1, 0.4), (0.2, 1.0), (0.5, 2.0))),
        learner_step_s=random.choose(((0.3, 1.5), (1.0, 6.0))),
        hostile=RandomStream("hostile", seed).happens(0.25),
        turns=RandomStream("turns", int(fixed), pattern).choose((1, 1, 2, 5)),
        editor=not fixed and RandomStream("editor", seed).happens(0.4),
        faults=draw_mix(random, links).model_copy(update={"stragglers": int(straggles)}),
    )
    if scenario.turns > 1:  # what the limits end earns nothing, so that few groups would differ
        scenario = scenario.model_copy(update={"reward_rarity": 1})
    hosted = RandomStream("hosts", int(fixed), pattern)
    changes: dict[str, Any] = {
        "skips": _draw_skips(scenario, RandomStream("taken-back", int(fixed), pattern))
    }
    if scenario.turns > 1 and hosted.happens(0.4):
        # What a lie spoils depends on who takes which group.
        others = [manner for manner in Manner if not (fixed and manner is Manner.LYING)]
        manners = (Manner.HONEST, *(hosted.choose(others) for _ in range(1 + hosted.index(3))))
        kills = hosted.index(4)
        changes |= {"hosts": tuple(dict.fromkeys(manners)), "reward_services": 1, "failure_rarity": 0}
        changes |= {"faults": scenario.faults.model_copy(update={"host_kills": kills})}
    return scenario.model_copy(update=changes)


def _draw_skips(scenario: Scenario, random: RandomStream) -> tuple[int, ...]:
    """Return the steps that are skipped: none in most runs, else up to three."""
    if not random.happens(0.3):
        return ()
    steps = scenario.run["run"]["steps"]
    return tuple(sorted({random.index(steps) for _ in range(1 + random.index(3))}))
