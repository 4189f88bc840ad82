"""Names: every entry of a run's ledger, and what it is called in sentences.

A document lies beside the files that it describes: ``batches/t000007.json`` beside
``batches/t000007.parquet``. Numbers have at least six digits, so that names sort.
"""

import re

RUN = "manifest.json"
CODE = "origins/code.json"
MACHINE = "origins/machine.json"
MODEL = "origins/model.json"
TRAIN = "origins/train.json"
HELDOUT = "origins/heldout.json"
"""Where the ledger keeps the documents there is one of."""
VERSIONS = "versions"
MODEL_FOLDER = "model"
CHECKPOINTS = "checkpoints"
RUN_FOLDER = "run"
"""Folders of versions, the base model's configuration, checkpoints, and a finished run's log and outcome."""

MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "LICENSE"),
)
"""What makes a version's weights a model again, and its tokens text; none is large."""
WEIGHTS, ADAPTER = "safetensors", "adapter.safetensors"
"""Endings of the files beside a version's document."""
OUTCOME_FILE = "outcome.json"
RUN_FILES = (
    *("config.yaml", "starts.json", "base.json", "metrics.jsonl", "evaluations.jsonl"),
    *("metrics.json", "timings.json", "final.json", "cpu_seconds.json"),
)
"""Files of a run's folder that are pinned as they are, where the run has them: all that its report reads."""

ORIGINS = {
    "base model": MODEL,
    "code": CODE,
    "machine": MACHINE,
    "train split": TRAIN,
    "held-out split": HELDOUT,
}
"""What a run starts from, by role."""
_FIXED = {RUN: ("run", "run"), **{rel: (role, role) for role, rel in ORIGINS.items()}}
_NUMBERED = {"versions/v": "version", "batches/t": "batch", "evaluations/v": "evaluation"}
_PATTERN = re.compile(r"(versions/v|batches/t|evaluations/v)(\d{6,})\.([a-z.]+)")
_FILES = {
    ("batch", "timings.parquet"): "timings of batch",
    ("batch", "samples.parquet"): "samples of filtered groups of step",
    ("evaluation", "samples.parquet"): "samples of evaluation",
    ("batch", "parquet"): "batch",
    ("version", WEIGHTS): "weights of version",
    ("version", ADAPTER): "adapter of version",
}
"""What the files beside documents are called, by kind and ending."""


def version_entry(version: int, kind: str = "json") -> str:
    """Return where the ledger keeps a version's document, or its weights (`WEIGHTS`), or its `ADAPTER`."""
    return f"{VERSIONS}/v{version:06d}.{kind}"


def version_of_weights(rel: str) -> int | None:
    """Return the version whose weights a ledger entry holds; None for any other entry.

    >>> version_of_weights("versions/v000012.safetensors"), version_of_weights("versions/v000012.json")
    (12, None)
    """
    match = _PATTERN.fullmatch(rel)
    return int(match[2]) if match and (match[1], match[3]) == ("versions/v", WEIGHTS) else None


def batch_entry(step: int, kind: str = "json") -> str:
    """Return where the ledger keeps a batch's document, or a file (`parquet`, `timings.parquet`,
    `samples.parquet`)."""
    return f"batches/t{step:06d}.{kind}"


def evaluation_entry(version: int, kind: str = "json") -> str:
    """Return where the ledger keeps an evaluation's document, or its kept answers (`samples.parquet`)."""
    return f"evaluations/v{version:06d}.{kind}"


def kind_of(rel: str) -> tuple[str, int | None] | None:
    """Return what a ledger entry documents and its number; None for an entry that is no document.

    >>> kind_of("batches/t000007.json"), kind_of("origins/code.json"), kind_of("batches/t000007.parquet")
    (('batch', 7), ('code', None), None)
    """
    if rel in _FIXED:
        return _FIXED[rel][0], None
    match = _PATTERN.fullmatch(rel)
    return (_NUMBERED[match[1]], int(match[2])) if match and match[3] == "json" else None


def name_of(rel: str) -> str:
    """Say what a ledger entry is.

    >>> [name_of(f"batches/t000007{end}") for end in (".json", ".parquet", ".timings.parquet")]
    ['manifest of batch 7', 'batch 7', 'timings of batch 7']
    >>> name_of("versions/v000012.safetensors"), name_of("evaluations/v000010.json")
    ('weights of version 12', 'manifest of evaluation 10')
    """
    known = kind_of(rel)
    if known is not None:
        kind, number = known
        return f"manifest of the {kind}" if number is None else f"manifest of {kind} {number}"
    match = _PATTERN.fullmatch(rel)
    if match and (words := _FILES.get((_NUMBERED[match[1]], match[3]))):
        return f"{words} {int(match[2])}"
    if match := re.fullmatch(r"checkpoints/v(\d+)/.+", rel):
        return f"checkpoint of version {int(match[1])}"
    if rel.startswith("model/"):
        return f"file {rel.removeprefix('model/')} of the base model"
    if rel.startswith("run/"):
        return f"file {rel.removeprefix('run/')} of the run"
    return f"entry {rel}"
