"""Saved: weights that a client keeps under a name, in the folder of the run that made them.

With kind `weights` a checkpoint, signed as the others of the run, lies beside the note of the name; with
`sampler_weights` the version's snapshot stays stored for as long as the note is there.
"""

from collections.abc import Sequence
from pathlib import Path

from antiphon.core.client_records import SavedWeights
from antiphon.core.errors import IntegrityError
from antiphon.lineage.saved_weights import (
    NOTE,
    SAVED,
    SavedNote,
    check_name,
    read_note,
    saved_folder,
    write_note,
)
from antiphon.net.security.credentials import learner_signer
from antiphon.net.security.keys import SigningKey
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.system.clock import wall_clock


class SavedFolder:
    """What is saved of one run, and of those beside it."""

    def __init__(self, run_dir: Path, signer: SigningKey | None = None) -> None:
        """Look into the folder of a run; `signer` is its learner's, None where nothing is signed."""
        self._run_dir, self._signer = run_dir, signer

    def checkpoints(self, name: str) -> CheckpointStore:
        """Return where the checkpoint of a name is, or is written to."""
        return CheckpointStore(saved_folder(self._run_dir, "weights", name), 1, self._signer)

    def write(
        self, kind: str, name: str, version: int, digest: str, expires_at: float | None = None
    ) -> SavedNote:
        """Note what a name stands for, once all of it is there.

        Raises:
            UnavailableError: when the disk is full or cannot be written.
        """
        folder = saved_folder(self._run_dir, kind, name)
        held = [path for path in folder.rglob("*") if path.is_file() and path.name != NOTE]
        size = sum(path.stat().st_size for path in held)
        note = SavedNote(version, digest, size, wall_clock(), expires_at)
        write_note(folder, note)
        return note

    def pinned(self) -> frozenset[int]:
        """Return the versions whose snapshots have to stay: those saved for sampling, and the first."""
        folders = (self._run_dir / SAVED / "sampler_weights").glob("*")
        return frozenset({0, *(note.version for folder in folders if (note := read_note(folder)))})

    def weights_of(self, source: SavedWeights) -> Path:
        """Return the folder of the checkpoint that a run of this home saved, every byte checked.

        Raises:
            IntegrityError: when it is not there, altered, or not signed by that run's learner.
        """
        run_dir = self._run_dir.parent / check_name(source.run_id)
        problem = "is not there"
        if source.kind == "weights" and run_dir.is_dir():
            for signer in self._signers(run_dir):
                store = CheckpointStore(saved_folder(run_dir, "weights", source.name), 1, signer)
                for version in reversed(store.versions()):
                    if (found := store.problem(version)) is None:
                        return store.folder(version)
                    problem = found
        raise IntegrityError(f"what is saved as {source.path} {problem}; load weights that were saved here")

    def _signers(self, run_dir: Path) -> Sequence[SigningKey | None]:
        if self._signer is None or run_dir == self._run_dir:
            return [self._signer]
        return [self._signer, learner_signer(run_dir, None)]
