"""Replay pins: what the ledger holds only so that a run can be executed again.

Version 0 and all batches are enough for that, with the model's own configuration beside them; a
checkpoint now and then spares a replay of late steps the early ones. Files are pinned as they lie,
so a checkpoint is read in the ledger exactly as on the learner's checkpoints.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from antiphon.lineage.documents.manifest import source_tree
from antiphon.lineage.names import CHECKPOINTS, MODEL_FOLDER

if TYPE_CHECKING:
    from antiphon.lineage.ledger.pins import Ledger

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "LICENSE",
)
"""What makes a version's weights a model again, and its tokens text; none is large."""

_log = structlog.get_logger("antiphon.lineage")


def pin_model(ledger: "Ledger", path: str) -> None:
    """Pin the base model's configuration; a model known by name only has no folder and is left out.

    `path` is `model.path` of the configuration, relative to here or to the source tree.
    """
    folder = Path(path) if Path(path).is_dir() else source_tree() / path
    for name in MODEL_FILES:
        rel = f"{MODEL_FOLDER}/{name}"
        if (folder / name).is_file() and ledger.md5(rel) is None:
            # A copy, not a link: what lies in the model's folder is the user's and may change.
            ledger.append(rel, (folder / name).read_bytes())


def due(version: int, interval: int, stride: int) -> bool:
    """Return whether the checkpoint of a version is pinned: of one each `interval`, every `stride`-th.

    A stride of 0 pins none.

    >>> [version for version in range(1, 61) if due(version, interval=5, stride=4)]
    [20, 40, 60]
    """
    return stride > 0 and version > 0 and version % (interval * stride) == 0


def pin_checkpoint(ledger: "Ledger", checkpoints: Path, version: int) -> str:
    """Pin a checkpoint of the learner's checkpoints; return the md5 of its list, empty when it is gone.

    The list of its digests comes last, so that half a checkpoint is never taken for a whole one.
    """
    name = f"v{version:08d}"
    folder, contents = checkpoints / name, f"{CHECKPOINTS}/{name}/contents.json"
    known = ledger.md5(contents)
    if known is not None:
        return known
    if not (folder / "contents.json").is_file():
        _log.info("checkpoint.unpinned", version=version, reason="it has left the learner's checkpoints")
        return ""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: path.name == "contents.json"):
        rel = f"{CHECKPOINTS}/{name}/{path.relative_to(folder).as_posix()}"
        if ledger.md5(rel) is None:
            ledger.append(rel, path)
    return ledger.md5(contents) or ""
