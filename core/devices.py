"""Devices: which GPUs of a machine each process of a run takes. Without a GPU nobody takes any."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.core.config_sections import LearnerSection, RolloutSection
from antiphon.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Devices:
    """Places among the GPUs that a run sees."""

    learner: tuple[int, ...] = ()
    """One for each rank."""
    workers: tuple[tuple[int, ...], ...] = ()
    """Of each worker, one for each process of its engine."""


def assign_devices(learner: LearnerSection, rollout: RolloutSection, found: int) -> Devices:
    """Return who takes which of the `found` GPUs of this machine.

    What the configuration leaves open takes those that nobody is given, the learner first. Where one GPU is
    all there is and nobody needs two, all share it.

    Raises:
        ConfigError: when one is named twice or is not there, or there are too few.
    """
    named = [*learner.devices, *(device for one in rollout.devices for device in one)]
    twice = next((device for device, count in Counter(named).items() if count > 1), None)
    if twice is not None:
        raise ConfigError(
            f"learner.devices={list(learner.devices)} and rollout.devices="
            f"{[list(one) for one in rollout.devices]} give GPU {twice} to two; name each once"
        )
    beyond = next((device for device in named if device >= found), None)
    if beyond is not None:
        there = f"sees GPUs 0 to {found - 1}" if found else "has no GPU"
        raise ConfigError(f"learner.devices or rollout.devices names GPU {beyond}, and this machine {there}")
    if not found:
        return Devices()
    each, workers = rollout.tensor_parallel, rollout.workers
    if found == 1 and not named and learner.ranks == each == 1:
        return Devices((0,), ((0,),) * workers)
    left = [device for device in range(found) if device not in named]
    needed = (0 if learner.devices else learner.ranks) + (0 if rollout.devices else workers * each)
    if needed > len(left):
        asked = f"learner.ranks={learner.ranks} and rollout.workers={workers}"
        raise ConfigError(
            f"{asked} with rollout.tensor_parallel={each} take {learner.ranks + workers * each} GPUs, and "
            f"this machine has {found}; lower one of them, or let workers join from elsewhere"
        )
    taken = tuple(learner.devices) or _take(left, learner.ranks)
    return Devices(taken, tuple(rollout.devices) or tuple(_take(left, each) for _ in range(workers)))


def _take(left: list[int], count: int) -> tuple[int, ...]:
    taken = tuple(left[:count])
    del left[:count]
    return taken


def visible(devices: Sequence[int], names: Sequence[str]) -> dict[str, str]:
    """Return the variable that shows a process its devices alone; `names` are those that this one sees."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[device] for device in devices)} if devices else {}
