"""Versions made again: weights that the ledger records by digest alone come from repeating recorded batches.

The digest decides: whatever else a replay compares, only weights of the recorded digest are handed out.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from antiphon.core.errors import IntegrityError
from antiphon.lineage.documents.replay_copy import ReplayCopy
from antiphon.services.learner.replay.steps import Replayer
from antiphon.system.files import PREFIX
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import write_snapshot


@contextmanager
def weights_of(
    copy: ReplayCopy, version: int, own_checkpoints: Path | None, tell: Callable[[str], None]
) -> Iterator[Path]:
    """Yield the safetensors file of a recorded version; one that is not kept is there until the end.

    `tell` hears how many steps have to be repeated, how long that takes, and how far it is; the rest as for
    `Replayer`.

    Raises:
        AntiphonError: when the replay cannot begin.
        IntegrityError: when its weights come out different from the recorded ones.
    """
    if (kept := copy.weights(version)) is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="antiphon-version-") as folder:
        path = Path(folder) / f"v{version:06d}.safetensors"
        make_version(copy, version, path, own_checkpoints, tell)
        yield path


def make_version(
    copy: ReplayCopy, version: int, path: Path, own_checkpoints: Path | None, tell: Callable[[str], None]
) -> int:
    """Make a version's weights again, write them as a safetensors file, and return the steps repeated.

    Arguments and errors as for `weights_of`.
    """
    tell(f"version {version} of {copy.run_id} is recorded by its digest alone; making it again")
    replayer = Replayer(copy, own_checkpoints=own_checkpoints)
    try:
        begun = replayer.start(version)
        source = f"the checkpoint of version {begun}" if begun else "the base model"
        steps = "1 step" if version - begun == 1 else f"{version - begun} steps"
        tell(f"{steps} to repeat from {source}")
        for step in range(begun, version):
            check = replayer.step(step)
            if check.found_digest != check.recorded_digest:
                raise IntegrityError(replayer.summary.first_difference() or check.words())
            left = version - step - 1
            more = f"; the other {left} take about {left * check.seconds:.0f} s" if left else ""
            tell(f"step {step} repeated in {check.seconds:.1f} s{more}")
        assert replayer.held is not None
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=path.parent) as folder:
            store = PayloadStore(Path(folder))
            manifest = write_snapshot(store, copy.run_id, version, replayer.held.weights)
            os.replace(store.path(manifest.payloads[0].digest), path)
        return version - begun
    finally:
        replayer.close()
