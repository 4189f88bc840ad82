"""Rollout tables: a batch as Parquet, equal rows giving equal bytes.

A batch is two files. The first holds what the learner trains on and nothing about hosts or
clocks; its digest is *the* batch digest. The second holds timings, worker and lease ids of
the same rows. Writer settings are fixed here, so the bytes depend on the rows, their order
and the pyarrow release, which the run's manifest records.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.records import BatchRow, FinishReason, RowTiming, VersionSpan
from antiphon.core.spans import check_cover
from antiphon.lineage.client_steps import is_client_step
from antiphon.system.spared import without

with without("pandas"):
    pa.array([])  # pyarrow looks once for pandas, whose import takes longer than hundreds of batches

_SPAN = pa.struct(
    [
        pa.field("version", pa.int64(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("stop", pa.int32(), nullable=False),
        pa.field("kept_cache", pa.bool_(), nullable=False),
    ]
)

_RANGE = pa.struct(
    [pa.field("start", pa.int32(), nullable=False), pa.field("stop", pa.int32(), nullable=False)]
)


def _column(name: str, kind: Any) -> Any:
    return pa.field(name, kind, nullable=False)


def _list_of(kind: Any) -> Any:
    return pa.list_(pa.field("element", kind, nullable=False))


BATCH_SCHEMA = pa.schema(
    [
        _column("group_id", pa.string()),
        _column("prompt_key", pa.string()),
        _column("sample_index", pa.int32()),
        _column("prompt_token_ids", _list_of(pa.int32())),
        _column("token_ids", _list_of(pa.int32())),
        _column("behaviour_logprobs", _list_of(pa.float32())),
        _column("spans", _list_of(_SPAN)),
        _column("finish_reason", pa.string()),
        _column("reward", pa.float64()),
        _column("advantage", pa.float64()),
        _column("failure", pa.string()),
    ],
    metadata={"antiphon.table": "batch/4"},
)
"""One row per trajectory; the lists are [P], [T], [T] and one entry per version span. What was left
out of the batch stands in the file's metadata (`LeftOut`)."""
TURNS_SCHEMA = pa.schema(
    [*BATCH_SCHEMA, _column("observed", _list_of(_RANGE))], metadata={"antiphon.table": "batch/5"}
)
"""The same where any trajectory has turns: also the ranges of tokens that were observed."""
BRANCHES_SCHEMA = pa.schema(
    [*TURNS_SCHEMA, _column("breaks", _list_of(pa.int32()))], metadata={"antiphon.table": "batch/6"}
)
"""The same where any context began afresh: also the tokens at which one did."""
REFERENCE_SCHEMA = pa.schema(
    [*BATCH_SCHEMA, _column("reference_logprobs", _list_of(pa.float32()))],
    metadata={"antiphon.table": "batch/7"},
)
"""As BATCH_SCHEMA where a reference model scored the tokens: also its log-probabilities, [T] each."""
_BATCH_SCHEMAS = BATCH_SCHEMA, TURNS_SCHEMA, BRANCHES_SCHEMA, REFERENCE_SCHEMA

_LEFT_OUT, _SAID = b"antiphon.left_out", b"antiphon.said"
_RECOMPUTED = b"antiphon.recomputed"
_BATCH_PLAIN = ("group_id", "prompt_key", "sample_index", "finish_reason", "reward", "advantage", "failure")
_BATCH_LISTS = {
    "prompt_token_ids": ("prompt_token_ids", np.int32),
    "token_ids": ("token_ids", np.int32),
    "behaviour_logprobs": ("logprobs", np.float32),
}
_REFERENCE_LISTS = {"reference_logprobs": ("reference_logprobs", np.float32)}
"""Columns of lists of numbers -> the field of a row that they hold, and its type."""

DRAFTING_COLUMNS = ("passes", "drafted", "covered", "accepted")
"""Counts of the group's drafting in the timings, as `core.records.DraftingStatistics` names them."""

TIMINGS_SCHEMA = pa.schema(
    [
        _column("group_id", pa.string()),
        _column("sample_index", pa.int32()),
        _column("worker_id", pa.string()),
        _column("lease_id", pa.string()),
        _column("attempt", pa.int32()),
        _column("generation_s", pa.float64()),
        _column("leased_at_s", pa.float64()),
        _column("submitted_at_s", pa.float64()),
        _column("rewarded_at_s", pa.float64()),
        *(pa.field(name, pa.int64()) for name in DRAFTING_COLUMNS),
    ],
    metadata={"antiphon.table": "timings/2"},
)
"""One row per trajectory, in the order of the batch; nulls where the engine could not draft."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A group that used up a place of a batch without being in it, since its rewards were all equal."""

    group_id: str
    """Empty in files of earlier versions, which have the sum over all such groups."""
    trajectories: int
    """What could not be scored counts nowhere."""
    tokens: int
    """Completion tokens of these trajectories."""


def encode_batch(
    rows: Sequence[BatchRow], left_out: Sequence[LeftOut] = (), recomputed: bool = False
) -> bytes:
    """Write the rows of a batch, in their order, as one Parquet file; no rows are fine.

    Args:
        rows: what the learner trains on.
        left_out: what it may divide its loss by besides (`algorithm.divisor`).
        recomputed: the engines gave no log-probabilities, and the learner takes its own; see `is_recomputed`.

    Raises:
        ContractError: when a row's logprobs or version spans do not cover its tokens, or some rows alone have
            a reference's.
    """
    referred = any(row.reference_logprobs is not None for row in rows)
    for row in rows:
        _check_row(row, referred)
    columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in _BATCH_PLAIN}
    columns["finish_reason"] = [row.finish_reason.value for row in rows]
    columns["spans"] = [[(x.version, x.start, x.stop, x.kept_cache) for x in row.spans] for row in rows]
    for name, (field, dtype) in (_BATCH_LISTS | (_REFERENCE_LISTS if referred else {})).items():
        arrays = [getattr(row, field) for row in rows]
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
        values = np.concatenate([*arrays, []], dtype=dtype, casting="unsafe")
        columns[name] = pa.ListArray.from_arrays(offsets, values, type=REFERENCE_SCHEMA.field(name).type)
    left, schema = "\n".join(f"{x.trajectories} {x.tokens} {x.group_id}" for x in left_out), BATCH_SCHEMA
    if any(row.observed for row in rows):
        columns["observed"], schema = [row.observed for row in rows], TURNS_SCHEMA
    if any(row.breaks for row in rows):
        columns["breaks"], schema = [row.breaks for row in rows], BRANCHES_SCHEMA
    schema = REFERENCE_SCHEMA if referred else schema
    facts = {_LEFT_OUT: left.encode()} | _said(rows) | ({_RECOMPUTED: b"yes"} if recomputed else {})
    return _write(columns, schema, facts)


def decode_batch(payload: bytes) -> list[BatchRow]:
    """Read the rows of a batch in their order; the inverse of `encode_batch`.

    Raises:
        IntegrityError: when the bytes are no batch table.
    """
    return read_batch(payload)[0]


def read_batch(payload: bytes) -> tuple[list[BatchRow], list[LeftOut]]:
    """Read a batch whole: its rows in their order, and what was left out of it.

    Raises:
        IntegrityError: when the bytes are no batch table.
    """
    with _table(payload, *_BATCH_SCHEMAS) as table:
        columns = {name: table.column(name).to_pylist() for name in _BATCH_PLAIN}
        columns["finish_reason"] = map(FinishReason, columns["finish_reason"])
        columns["spans"] = [
            tuple(VersionSpan(**x) for x in spans) for spans in table.column("spans").to_pylist()
        ]
        if "observed" in table.column_names:
            ranges = table.column("observed").to_pylist()
            columns["observed"] = [tuple((x["start"], x["stop"]) for x in own) for own in ranges]
        if "breaks" in table.column_names:
            columns["breaks"] = list(map(tuple, table.column("breaks").to_pylist()))
        referred = "reference_logprobs" in table.column_names
        for name, (field, _) in (_BATCH_LISTS | (_REFERENCE_LISTS if referred else {})).items():
            lists = table.column(name).combine_chunks()
            values = lists.flatten().to_numpy().copy()  # which may be written to
            columns[field] = np.split(values, np.cumsum(lists.value_lengths()))[: len(lists)]
        columns["said"] = _said_in(table)
        rows = [
            BatchRow(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)
        ]
        lines = [line.partition(b" ") for line in table.schema.metadata[_LEFT_OUT].splitlines()]
        pairs = [(int(count), rest.partition(b" ")) for count, _, rest in lines]
        return rows, [LeftOut(group.decode(), count, int(tokens)) for count, (tokens, _, group) in pairs]


def is_recomputed(payload: bytes) -> bool:
    """Return whether a batch says that its behaviour logprobs are the learner's to compute.

    They are 0 in the file then, and those of the versions that its spans name.
    """
    with _table(payload, *_BATCH_SCHEMAS) as table:
        return _RECOMPUTED in (table.schema.metadata or {})


def sampled_versions(payload: bytes) -> tuple[int, ...]:
    """Return the policy versions that sampled any token of a batch, ascending; none for a client's step.

    Raises:
        IntegrityError: when the bytes are no batch table.
    """
    if is_client_step(payload):
        return ()
    with _table(payload, *_BATCH_SCHEMAS, columns=("spans",)) as table:
        spans = table.column("spans").combine_chunks().flatten()
        return tuple(sorted(set(spans.field("version").to_pylist())))


def encode_timings(rows: Sequence[RowTiming]) -> bytes:
    """Write the timings beside a batch as one Parquet file; no rows are fine."""
    names = TIMINGS_SCHEMA.names
    return _write({name: [getattr(row, name) for row in rows] for name in names}, TIMINGS_SCHEMA, _said(rows))


def decode_timings(payload: bytes) -> list[RowTiming]:
    """Read the timings beside a batch; the inverse of `encode_timings`.

    Raises:
        IntegrityError: when the bytes are no timings table.
    """
    with _table(payload, TIMINGS_SCHEMA) as table:
        rows = zip(table.to_pylist(), _said_in(table), strict=True)
        return [RowTiming(**row, said=said) for row, said in rows]


def count_workers(payload: bytes) -> dict[str, int]:
    """Return how many trajectories of a timings file each worker sampled, by worker id.

    Raises:
        IntegrityError: when the bytes are no timings table.
    """
    with _table(payload, TIMINGS_SCHEMA, columns=("worker_id",)) as table:
        return dict(sorted(Counter(table.column("worker_id").to_pylist()).items()))


def _said(rows: Sequence[BatchRow | RowTiming]) -> dict[bytes, bytes]:
    """Return what a table's metadata has of what environments said; nothing where none said anything."""
    said = [row.said for row in rows]
    return {_SAID: json.dumps(said).encode()} if any(said) else {}


def _said_in(table: Any) -> list[str]:
    found = (table.schema.metadata or {}).get(_SAID)
    return [""] * table.num_rows if found is None else list(json.loads(found))


def _check_row(row: BatchRow, referred: bool) -> None:
    where = f"sample {row.sample_index} of group {row.group_id}"
    if row.token_ids.shape != row.logprobs.shape or row.token_ids.ndim != 1:
        raise ContractError(
            f"{where} has {row.token_ids.shape} tokens but {row.logprobs.shape} behaviour "
            "logprobs; the worker must send one per token"
        )
    check_cover(row.spans, 0, row.token_ids.size, where, observed=row.observed)
    given = row.reference_logprobs
    if referred and (given is None or given.shape != row.token_ids.shape or row.observed or row.breaks):
        raise ContractError(
            f"{where} has {'no' if given is None else given.shape} reference logprobs for "
            f"{row.token_ids.shape} tokens; each row of a batch needs one per token, and none may have turns"
        )


def _write(columns: Mapping[str, Any], schema: Any, facts: Mapping[bytes, bytes] | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pydict(columns, schema=schema)
    with pq.ParquetWriter(
        sink,
        schema,
        version="2.6",
        data_page_version="1.0",
        compression="zstd",
        compression_level=3,
        use_dictionary=True,
        write_statistics=False,
        store_schema=False,
    ) as writer:
        writer.write_table(table, row_group_size=max(1, table.num_rows))
        writer.add_key_value_metadata(schema.metadata | (facts or {}))
    return bytes(sink.getvalue())


@contextmanager
def _table(payload: bytes, *schemas: Any, columns: Sequence[str] = ()) -> Iterator[Any]:
    """Yield a table of one of some schemas, or some of its columns; damage may show only while the rows are
    made of it.

    Raises:
        IntegrityError: when it is another table, and instead of whatever reading raised.
    """
    known = {schema.metadata[b"antiphon.table"].decode(): schema.names for schema in schemas}
    name = next(iter(known))
    try:
        file = pq.ParquetFile(pa.BufferReader(payload))
        names = file.schema_arrow.names
        table = file.read(columns=list(columns) or None, use_threads=False)
        found = (table.schema.metadata or {}).get(b"antiphon.table", b"").decode()
        if known.get(found) != names:
            raise IntegrityError(
                f"a {found or 'foreign'} table with columns {names} was given where a {name} table "
                "is needed; pass the digest of the right file"
            )
        yield table
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise IntegrityError(
            f"{len(payload)} bytes are no readable {name} table: {' '.join(str(error).split())[:200]}; "
            "fetch the file again"
        ) from error
