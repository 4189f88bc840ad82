"""Checkpoints: whole or not there, and read only when every byte is the one that was written.

A checkpoint is a folder `v<version>` with the engine's files and `contents.json`, which lists
their digests. It is written under another name, flushed to the disk, and renamed at the end; only then
do older ones go. DeepSpeed's files are
pickles, so nothing of them is opened before the list was checked; a learner also signs the list
and believes no other. Folders and files are their owner's alone.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from antiphon.core.digests import digest_file
from antiphon.core.errors import UnavailableError
from antiphon.net.security.keys import SigningKey, make_private_folder, verifies, write_private
from antiphon.system import failpoints
from antiphon.system.files import flush_folder, flush_tree, write_atomically

_CONTENTS = "contents.json"
_INCOMING = ".incoming-"
_log = structlog.get_logger(__name__)


class CheckpointStore:
    """The checkpoints of one run; a few of the newest are kept."""

    def __init__(
        self,
        root: Path,
        kept: int,
        signer: SigningKey | None = None,
        recorded: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Use a folder, which need not exist yet; the newest `kept` checkpoints stay in it.

        So do those above the version that `recorded` returns, as the run's records need them still.

        The `signer` signs the lists, and only what it signed is believed; None where another record
        vouches for the files, as a ledger does.
        """
        self.root = root
        self._kept = kept
        self._signer, self._recorded = signer, recorded
        self.checked: Callable[[int], None] = lambda length: None
        """Called with the bytes of each piece of a file whose digest is made."""

    def write(self, version: int, save: Callable[[Path], Mapping[str, str] | None]) -> None:
        """Add a checkpoint, then drop all but the newest.

        Args:
            version: the version it holds; a checkpoint of that version is replaced.
            save: writes the engine's files into the folder it is given, and returns the digests of those
                that others digested, as ranks do theirs.

        Raises:
            UnavailableError: when the disk is full or cannot be written; the folder is removed.
        """
        incoming = self.incoming(version)
        try:
            for left in self.root.glob(f"{_INCOMING}*"):  # by a learner that was killed
                shutil.rmtree(left, ignore_errors=True)
            make_private_folder(self.root)
            make_private_folder(incoming)
            listed = dict(save(incoming) or {})
            failpoints.reach("learner.checkpoint.inside")
            for name in set(_files(incoming)) - listed.keys():
                listed[name] = digest_file(incoming / name, self.checked)
            contents = json.dumps(listed, sort_keys=True).encode()
            write_atomically(incoming / _CONTENTS, contents)
            for path in incoming.rglob("*"):  # closed to others
                path.chmod(0o700 if path.is_dir() else 0o600)
            flush_tree(incoming)
            self._sign(version, contents)
            shutil.rmtree(self.folder(version), ignore_errors=True)
            incoming.rename(self.folder(version))
            flush_folder(self.root)
        except (OSError, RuntimeError, UnavailableError) as error:
            # torch reports a full disk as a RuntimeError of its archive writer.
            shutil.rmtree(incoming, ignore_errors=True)
            raise UnavailableError(
                f"the checkpoint of version {version} could not be written to {self.root}: "
                f"{' '.join(str(error).split())[:200]}; free some space there"
            ) from error
        recorded = self._recorded()
        for old in self.versions()[: -self._kept]:
            if recorded is not None and old > recorded:
                continue
            shutil.rmtree(self.folder(old), ignore_errors=True)
            self._signature(old).unlink(missing_ok=True)

    def versions(self) -> list[int]:
        """Return the versions of the checkpoints, oldest first, sound or not."""
        if not self.root.is_dir():
            return []
        names = [path.name[1:] for path in self.root.glob("v*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdigit())

    def newest_sound(self, at_most: int) -> int | None:
        """Return the newest version up to `at_most` whose files are all as written, or None."""
        for version in reversed(self.versions()):
            if version > at_most:
                continue
            problem = self.problem(version)
            if problem is None:
                return version
            _log.warning("checkpoint.refused", version=version, reason=problem)
        return None

    def folder(self, version: int) -> Path:
        """Return where the checkpoint of `version` lies or would lie."""
        return self.root / f"v{version:08d}"

    def incoming(self, version: int) -> Path:
        """Return where the files of a checkpoint lie while they are written."""
        return self.root / f"{_INCOMING}{version}"

    def problem(self, version: int) -> str | None:
        """Return why a checkpoint may not be opened, naming the file that was altered, or None."""
        folder = self.folder(version)
        try:
            contents = (folder / _CONTENTS).read_bytes()
            if self._signer is not None and not self._signed(version, contents):
                return "was not signed by this run's learner"
            listed = json.loads(contents)
        except (OSError, ValueError, RecursionError):
            return f"has no readable {_CONTENTS}"
        found = set(_files(folder)) - {_CONTENTS}
        if not isinstance(listed, dict) or not listed or found != set(listed):
            return "does not hold the files it lists"
        for name in sorted(found):
            if digest_file(folder / name, self.checked) != listed[name]:
                return f"has an altered file {name}"
        return None

    def _signature(self, version: int) -> Path:
        # Beside the folder: what the folder holds is exactly what its list names.
        return self.root / f"v{version:08d}.sig"

    def _sign(self, version: int, contents: bytes) -> None:
        if self._signer is not None:
            write_private(self._signature(version), self._signer.sign(_signed_bytes(version, contents)))

    def _signed(self, version: int, contents: bytes) -> bool:
        assert self._signer is not None
        try:
            signature = self._signature(version).read_bytes()
        except FileNotFoundError:
            return False
        return verifies(self._signer.public, _signed_bytes(version, contents), signature)


def _signed_bytes(version: int, contents: bytes) -> bytes:
    return b"antiphon checkpoint %d\n" % version + contents


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
