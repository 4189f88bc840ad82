"""Saved: weights that a client keeps under a name, in the folder of the run that made them.

`RUN_DIR/saved/KIND/NAME/saved.json` says which version a name stands for, and the digest of its weights; it
is written last. With kind `weights` a checkpoint, signed as the others of the run, lies beside it; with
`sampler_weights` the version's snapshot stays stored for as long as the note is there.
"""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from antiphon.core.client_records import SavedWeights
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.net.security.credentials import learner_signer
from antiphon.net.security.keys import SigningKey
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.system.files import write_atomically

SAVED, NOTE = "saved", "saved.json"
KINDS = ("weights", "sampler_weights")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class SavedNote:
    """What a name stands for."""

    version: int
    digest: str
    """blake3 of the version's weights."""
    bytes: int
    """Of the checkpoint; of weights that can only be sampled from 0, as the snapshot is not theirs alone."""


class SavedFolder:
    """What is saved of one run, and of those beside it."""

    def __init__(self, run_dir: Path, signer: SigningKey | None = None) -> None:
        """Look into the folder of a run; `signer` is its learner's, None where nothing is signed."""
        self._run_dir, self._signer = run_dir, signer

    def folder(self, kind: str, name: str) -> Path:
        """Return the folder of a name.

        Raises:
            ContractError: when there can be no such kind or name.
        """
        if kind not in KINDS:
            raise ContractError(f"{kind!r} cannot be saved; give one of {' and '.join(KINDS)}")
        return self._run_dir / SAVED / kind / check_name(name)

    def checkpoints(self, name: str) -> CheckpointStore:
        """Return where the checkpoint of a name is, or is written to."""
        return CheckpointStore(self.folder("weights", name), 1, self._signer)

    def note(self, kind: str, name: str) -> SavedNote | None:
        """Return what a name stands for, or None.

        Raises:
            IntegrityError: when its note cannot be read.
        """
        path = self.folder(kind, name) / NOTE
        try:
            return SavedNote(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise IntegrityError(f"{path} is not readable; save the weights again") from error

    def write(self, kind: str, name: str, version: int, digest: str) -> SavedNote:
        """Note what a name stands for, once all of it is there.

        Raises:
            UnavailableError: when the disk is full or cannot be written.
        """
        folder = self.folder(kind, name)
        held = [path for path in folder.rglob("*") if path.is_file() and path.name != NOTE]
        note = SavedNote(version, digest, sum(path.stat().st_size for path in held))
        write_atomically(folder / NOTE, json.dumps(asdict(note), sort_keys=True).encode())
        return note

    def forget(self, kind: str, name: str) -> None:
        """Remove the note of a name, before what it stands for is replaced or goes."""
        (self.folder(kind, name) / NOTE).unlink(missing_ok=True)

    def drop(self, kind: str, name: str) -> None:
        """Give up what was saved under a name; what is not there is ignored."""
        self.forget(kind, name)
        shutil.rmtree(self.folder(kind, name), ignore_errors=True)

    def pinned(self) -> frozenset[int]:
        """Return the versions whose snapshots have to stay: those saved for sampling, and the first."""
        folder = self._run_dir / SAVED / "sampler_weights"
        found = {0}
        for path in folder.glob(f"*/{NOTE}"):
            if note := self.note("sampler_weights", path.parent.name):
                found.add(note.version)
        return frozenset(found)

    def weights_of(self, source: SavedWeights) -> Path:
        """Return the folder of the checkpoint that a run of this home saved, every byte checked.

        Raises:
            IntegrityError: when it is not there, altered, or not signed by that run's learner.
        """
        run_dir = self._run_dir.parent / check_name(source.run_id)
        problem = "is not there"
        if source.kind == "weights" and run_dir.is_dir():
            for signer in self._signers(run_dir):
                store = CheckpointStore(run_dir / SAVED / "weights" / check_name(source.name), 1, signer)
                for version in reversed(store.versions()):
                    if (found := store.problem(version)) is None:
                        return store.folder(version)
                    problem = found
        raise IntegrityError(f"what is saved as {source.path} {problem}; load weights that were saved here")

    def _signers(self, run_dir: Path) -> Sequence[SigningKey | None]:
        if self._signer is None or run_dir == self._run_dir:
            return [self._signer]
        return [self._signer, learner_signer(run_dir, None)]


def check_name(name: str) -> str:
    """Return a name when a folder can have it.

    Raises:
        ContractError: when it cannot.
    """
    if not _NAME.fullmatch(name):
        raise ContractError(
            f"{name[:40]!r} cannot be a name; give 1 to 128 of A-Z a-z 0-9 . _ -, the first neither . nor -"
        )
    return name
