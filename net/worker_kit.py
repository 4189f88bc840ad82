"""Worker kit: what a worker needs of a model to start without its weights, in one signed archive.

The learner packs its model folder without weights: configuration, tokenizer, chat template and a table of
the tensors. A worker whose machine has no such folder fetches the kit from the coordinator, starts its engine
on random weights, and serves once the first snapshot is loaded and the engine has tested itself on that.

The archive is a compressed message of names and contents. It comes from the network, so it is read strictly:
the signature and the digest first, sizes before memory is taken, and names from a list.
"""

import asyncio
import json
import os
import tempfile
import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from antiphon.api.coordinator import KitPart
from antiphon.core.digests import check_digest, digest_bytes
from antiphon.core.errors import ConfigError, ContractError, IntegrityError, UnavailableError
from antiphon.core.patience import Patience
from antiphon.models.directory import TENSOR_TABLE, tensor_table
from antiphon.net.rpc.retry import MOST_PAUSE_S
from antiphon.net.security.keys import SIGNATURE_BYTES, SigningKey, verifies
from antiphon.protos import coordinator_pb2
from antiphon.system.files import write_atomically

KIT_FILE = "worker.kit"
"""In a run's folder: signature and digest of the archive, 64 and 32 bytes, then the archive."""
DIGEST_BYTES = 32
KIT_BYTES = 20 << 20
"""Largest archive."""
KIT_PART_BYTES = 256 << 10
"""Of one answer: a link of 0.2 Mbit/s still brings it within a call's deadline."""
UNPACKED_BYTES = 128 << 20
"""Most bytes of its files together."""
_NAMES_BYTES = 4096
"""Most bytes that their names and lengths add."""
KIT_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    TENSOR_TABLE,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""The only files that a kit may hold: no weights, and nothing that anyone runs."""
_IN_TOKENIZER = ("merges.txt", "vocab.json")  # tokenizer.json says the same
_PURPOSE = b"antiphon worker kit\n"
"""Keeps a signature made for one thing from being shown for another."""

_log = structlog.get_logger(__name__)


def pack_kit(model_dir: Path) -> bytes:
    """Return the kit of a model folder.

    Raises:
        ConfigError: when the folder holds no model, or its tokenizer does not fit into `KIT_BYTES`.
    """
    table = [[name, dtype, list(shape)] for name, dtype, shape in tensor_table(model_dir)]
    files = {TENSOR_TABLE: json.dumps(table, separators=(",", ":")).encode()}
    for name in KIT_FILES:
        path = model_dir / name
        skipped = name in _IN_TOKENIZER and (model_dir / "tokenizer.json").is_file()
        if path.is_file() and name not in files and not skipped:
            files[name] = path.read_bytes()
    archive = _packed(files)
    if len(archive) > KIT_BYTES or sum(map(len, files.values())) > UNPACKED_BYTES:
        largest = max(files, key=lambda name: len(files[name]))
        raise ConfigError(
            f"model.path={model_dir} has {largest} of {len(files[largest]) >> 20} MiB, too large for a "
            f"worker kit of {KIT_BYTES >> 20} MiB; workers need the model's folder on their own machine"
        )
    return archive


def read_kit(archive: bytes) -> dict[str, bytes]:
    """Return the files of a kit by name.

    Raises:
        IntegrityError: when the bytes are no kit, or hold another file than a kit may.
    """
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(archive, UNPACKED_BYTES + _NAMES_BYTES)
        kit = coordinator_pb2.Kit.FromString(plain)
    except (zlib.error, DecodeError) as error:
        raise _broken(f"it cannot be read ({error})") from error
    if not inflate.eof or inflate.unused_data:
        raise _broken(f"it is cut off, goes on behind its end, or holds more than {UNPACKED_BYTES} bytes")
    files = {one.name: one.content for one in kit.files}
    if len(files) < len(kit.files) or not files.keys() <= set(KIT_FILES):
        raise _broken("it holds a file that no kit holds, or one twice")
    if "config.json" not in files or TENSOR_TABLE not in files:
        raise _broken(f"it lacks config.json or {TENSOR_TABLE}")
    return files


def write_kit(model_dir: Path, run_id: str, run_dir: Path, signer: SigningKey | None) -> None:
    """Put the kit of a run's model into the run's folder, where the coordinator finds it.

    A model of which no kit can be made is no reason to stop: the log says it, and workers need its folder.
    """
    try:
        archive = pack_kit(model_dir)
    except ConfigError as error:
        _log.warning("worker_kit.not_made", reason=str(error))
        return
    digest = digest_bytes(archive)
    signature = bytes(SIGNATURE_BYTES) if signer is None else signer.sign(_signed(run_id, digest))
    write_atomically(run_dir / KIT_FILE, signature + bytes.fromhex(digest) + archive)
    _log.info("worker_kit.made", bytes=len(archive))


def kit_part(path: Path, offset: int) -> KitPart | None:
    """Return `KIT_PART_BYTES` of the archive from `offset` on, or its rest; None while there is none."""
    try:
        with path.open("rb") as file:
            signature, digest = file.read(SIGNATURE_BYTES), file.read(DIGEST_BYTES)
            total = max(0, os.fstat(file.fileno()).st_size - file.tell())
            file.seek(min(max(0, offset), total), os.SEEK_CUR)
            return KitPart(digest.hex(), total, signature, file.read(KIT_PART_BYTES))
    except OSError:
        return None


async def fetch_kit(
    ask: Callable[[int], Awaitable[KitPart | None]],
    run_id: str,
    learner_key: bytes,
    root: Path,
    stall_timeout_s: float,
    arrived: Callable[[int], None],
) -> Path:
    """Bring the kit of a run here and return its folder, a model folder without weights.

    Args:
        ask: asks the coordinator for the part that begins at an offset.
        run_id: the run that the kit must be signed for.
        learner_key: public key of the learner, 32 bytes; empty where the run signs nothing.
        root: folder for kits, each under its digest; one that is there already is not fetched again.
        stall_timeout_s: longest time without a byte.
        arrived: called with the bytes of each part.

    Raises:
        IntegrityError: when it is not signed by the learner, or not what was signed; nothing is unpacked.
        UnavailableError: when nothing comes for `stall_timeout_s`.
    """
    clock = asyncio.get_running_loop().time
    patience, held = Patience(clock()), bytearray()
    first: KitPart | None = None
    while first is None or len(held) < first.total_bytes:
        part = await ask(len(held))
        if part is None:
            if patience.still_s(len(held), clock()) > stall_timeout_s:
                raise UnavailableError(
                    f"the coordinator of {run_id} had no worker kit for {stall_timeout_s:g} s; see the "
                    "learner's log, or put the model's folder on this machine"
                )
            await asyncio.sleep(MOST_PAUSE_S)
            continue
        if first is None or part.digest != first.digest:
            _check_offer(part, run_id, learner_key)
            if first is not None:
                raise UnavailableError(
                    f"the worker kit of {run_id} changed while it was fetched; start again"
                )
            first = part
            if (root / part.digest).is_dir():
                return root / part.digest
        if not part.data or len(held) + len(part.data) > first.total_bytes:
            raise _broken(f"{len(part.data)} bytes came at {len(held)} of {first.total_bytes}")
        held += part.data
        arrived(len(part.data))
        patience.still_s(len(held), clock())
    return await asyncio.to_thread(_unpack, bytes(held), first.digest, root)


def _check_offer(part: KitPart, run_id: str, learner_key: bytes) -> None:
    """Check what a part says of the whole, before memory is taken for it."""
    try:
        check_digest(part.digest)
    except ContractError as error:
        raise _broken(str(error)) from None
    if learner_key and not verifies(learner_key, _signed(run_id, part.digest), part.signature):
        raise IntegrityError(
            f"the worker kit of {run_id} is not signed by the learner of this run; nothing of it was "
            "unpacked: see that learner.pub is the run's own"
        )
    if not 0 < part.total_bytes <= KIT_BYTES:
        raise _broken(f"it claims {part.total_bytes} bytes, not 1..{KIT_BYTES}")


def _unpack(archive: bytes, digest: str, root: Path) -> Path:
    if (found := digest_bytes(archive)) != digest:
        raise _broken(f"its digest is {found[:12]}, but {digest[:12]} was signed")
    files, place = read_kit(archive), root / digest
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".unpacking-") as temporary:
        folder = Path(temporary) / "kit"
        for name, content in files.items():
            write_atomically(folder / name, content)
        try:
            folder.rename(place)
        except OSError:
            if not place.is_dir():  # else another process was faster
                raise
    _log.info("worker_kit.unpacked", bytes=len(archive), files=len(files))
    return place


def _signed(run_id: str, digest: str) -> bytes:
    return _PURPOSE + f"{run_id}\n{digest}".encode()


def _packed(files: Mapping[str, bytes]) -> bytes:
    parts = [coordinator_pb2.KitFile(name=name, content=files[name]) for name in sorted(files)]
    return zlib.compress(coordinator_pb2.Kit(files=parts).SerializeToString(), 6)


def _broken(reason: str) -> IntegrityError:
    return IntegrityError(f"the worker kit is not sound: {reason}; nothing of it was unpacked")
