"""Client calls: what a learner does for a client between two steps, on the files of its run.

A call file lies in RUN_DIR/calls under its digest; its result is written beside it before the caller hears.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from antiphon.core.digests import check_digest, digest_bytes
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.lineage.client_steps import decode_call, encode_result
from antiphon.lineage.saved_weights import NOTE, SavedNote, drop_saved, read_note, saved_folder
from antiphon.services.learner.saved import SavedFolder
from antiphon.services.learner.snapshot_model import SnapshotModel
from antiphon.services.learner.step import Trainer
from antiphon.system.files import write_atomically

CALLS = "calls"
_log = structlog.get_logger(__name__)


class ClientCalls:
    """The calls of one run; the methods that name the trainer run on its thread."""

    def __init__(self, run_dir: Path, trainer: Trainer, saved: SavedFolder, model: SnapshotModel) -> None:
        """Prepare; `model` scores tokens, `saved` has what the client keeps."""
        self._run_dir, self._folder = run_dir, run_dir / CALLS
        self._trainer, self._saved = trainer, saved
        self.model = model
        self.again, self.drop = saved.write, partial(drop_saved, run_dir)

    def answered(self, digest: str) -> bool:
        """Return whether the result of a call is there, whichever version it was done by."""
        return self._result(digest).exists()

    def _result(self, digest: str) -> Path:
        return self._folder / f"{check_digest(digest)}.out"

    def call(self, place: int, digest: str, forward_only: bool) -> tuple[int, bool]:
        """Do a call, with the trainer; return how many are held, and whether its result is written.

        Raises:
            ContractError, IntegrityError: as `Learner.await_call`.
        """
        held: Sequence[str] = self._trainer.held_calls()
        result = self._result(digest)
        given = result.with_suffix("")
        if not forward_only:
            if place < len(held) and held[place] != digest:
                self._trainer.forget_calls()  # one that the client heard failed: the others are given again
                held = ()
            if place > len(held):
                return len(held), False
            if place < len(held) and result.exists():
                return len(held), True
        try:
            payload = given.read_bytes()
        except OSError as error:
            raise ContractError(f"{given} cannot be read: {error.strerror}; write the call first") from error
        if digest_bytes(payload) != digest:
            raise IntegrityError(f"{given} was altered; write the call again")
        call = decode_call(payload)
        if call.forward_only != forward_only:
            raise ContractError(f"the call {digest[:12]} has forward_only={call.forward_only}; ask for it so")
        if not forward_only and place < len(held):  # done before, and its result was lost
            call = replace(call, forward_only=True)
        write_atomically(result, encode_result(self._trainer.call(call, digest)))
        return len(self._trainer.held_calls()), True

    def note(self, kind: str, name: str) -> SavedNote | None:
        """Return what a name stands for, or None; also where its note is damaged: saving again mends it."""
        try:
            return read_note(saved_folder(self._run_dir, kind, name))
        except IntegrityError as error:
            _log.warning("saved.unreadable", kind=kind, name=name, reason=str(error))
            return None

    def save(self, name: str, digest: str, expires_at: float | None) -> SavedNote:
        """Keep the version that the trainer holds as a checkpoint.

        Raises:
            UnavailableError: when the disk is full; nothing is left then.
        """
        # A note never stands beside another version's checkpoint.
        (saved_folder(self._run_dir, "weights", name) / NOTE).unlink(missing_ok=True)
        version = self._trainer.save_to(self._saved.checkpoints(name))
        return self._saved.write("weights", name, version, digest, expires_at)

    def pin(self, name: str, version: int, stored: Mapping[int, str], expires_at: float | None) -> SavedNote:
        """Keep the stored snapshot of a version.

        Raises:
            ContractError: when it is not stored.
        """
        if version not in stored:
            raise ContractError(f"version {version} is not stored any more; save a newer one")
        return self._saved.write("sampler_weights", name, version, stored[version], expires_at)
