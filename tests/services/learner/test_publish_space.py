"""A snapshot is begun only above the floor of free space; below it nothing is written, and asked again."""

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.config_sections import LearnerSection, LoraSection
from antiphon.core.errors import BlockedError
from antiphon.core.ranks.memory import trained_parameters
from antiphon.core.reporting.alarms import short_of_space
from antiphon.services.learner.progress import ProgressCounter
from antiphon.services.learner.publish import SnapshotPublisher
from antiphon.services.learner.training import TrainedStep, read_weights
from antiphon.system.free_space import OPTIMIZER_BYTES, SpaceFloor, space_needed
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import weights_of

WEIGHTS = weights_of({"a": torch.zeros(1 << 18), "b": torch.ones(1 << 18)})
PAYLOAD, PARAMETERS = 2 << 20, 1 << 19


class Disk:
    """A disk whose free bytes a test sets."""

    free_bytes = 0

    def free(self, folder: Path) -> int:
        return self.free_bytes


def publisher(folder: Path, disk: Disk, least_bytes: int | None) -> SnapshotPublisher:
    payloads, space = PayloadStore(folder / "payloads"), SpaceFloor(folder, least_bytes, disk.free)
    return SnapshotPublisher("r", payloads, None, 8, space=space)


def write(made: SnapshotPublisher, progress: ProgressCounter) -> str:
    return read_weights(TrainedStep(3, WEIGHTS, {}), made, progress, writes=True)[0]


def test_below_the_floor_nothing_is_written_and_with_space_it_goes_on(tmp_path: Path) -> None:
    disk, progress = Disk(), ProgressCounter()
    made = publisher(tmp_path, disk, None)
    disk.free_bytes = space_needed(PAYLOAD, OPTIMIZER_BYTES * PARAMETERS) - 1
    for _ in range(2):
        with pytest.raises(
            BlockedError, match=r"11 MiB are free.*12 MiB must be.*`antiphon gc`.*record\.free_mib"
        ):
            write(made, progress)
    assert list(tmp_path.rglob("*")) == []
    alarm = short_of_space(progress.read())
    assert alarm is not None and alarm.text.startswith("waiting for space to publish version 3")
    disk.free_bytes += 1
    digest = write(made, progress)
    assert made.stored() == {3: digest}
    disk.free_bytes = 0
    assert made.manifest(3, "h:2").origin == "h:2"  # it is written already: announcing it needs no space


def test_the_newest_checkpoint_is_measured_where_there_is_one(tmp_path: Path) -> None:
    disk = Disk()
    for version, size in ((5, 1 << 20), (10, 3 << 20)):
        (tmp_path / f"checkpoints/v{version:08d}").mkdir(parents=True)
        (tmp_path / f"checkpoints/v{version:08d}/state").write_bytes(bytes(size))
    made = publisher(tmp_path, disk, None)
    disk.free_bytes = 2 * PAYLOAD + (3 << 20) - 1
    with pytest.raises(BlockedError, match="7 MiB must be"):
        write(made, ProgressCounter())
    disk.free_bytes = 8 << 20
    write(made, ProgressCounter())


def test_a_checkpoint_of_adapters_is_reckoned_by_what_they_train(tmp_path: Path) -> None:
    learner = LearnerSection(lora=LoraSection(rank=2))
    space = SpaceFloor(tmp_path, None, lambda folder: 1 << 20)
    trained = partial(trained_parameters, learner)
    made = SnapshotPublisher("r", PayloadStore(tmp_path / "p"), None, 8, space=space, trained=trained)
    weights = weights_of({"model.layers.0.self_attn.q_proj.weight": torch.zeros(300, 300)})
    digest = read_weights(TrainedStep(3, weights, {}), made, ProgressCounter(), writes=True)[0]
    assert made.stored() == {3: digest}


@given(floor=st.integers(0, 1 << 40), free=st.integers(0, 1 << 40))
def test_a_configured_floor_alone_decides(floor: int, free: int) -> None:
    space = SpaceFloor(Path("nowhere"), floor, lambda folder: free)
    if free >= floor:
        space.check(1, 1 << 50, 1)
        return
    with pytest.raises(BlockedError, match="waiting for space to publish version 1"):
        space.check(1, 0, 0)
