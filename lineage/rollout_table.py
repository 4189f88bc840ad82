"""Rollout tables: a batch as Parquet, equal rows giving equal bytes.

A batch is two files. The first holds what the learner trains on and nothing about hosts or
clocks; its digest is *the* batch digest. The second holds timings, worker and lease ids of
the same rows. Writer settings are fixed here, so the bytes depend on the rows, their order
and the pyarrow release, which the run's manifest records.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.records import BatchRow, FinishReason, FloatArray, IntArray, RowTiming, VersionSpan
from antiphon.core.spans import check_cover
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

_LEFT_OUT = b"antiphon.left_out"

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


def encode_batch(rows: Sequence[BatchRow], left_out: Sequence[LeftOut] = ()) -> bytes:
    """Write the rows of a batch, in their order, as one Parquet file; no rows are fine.

    Args:
        rows: what the learner trains on.
        left_out: what it may divide its loss by besides (`algorithm.divisor`).

    Raises:
        ContractError: when a row's logprobs or version spans do not cover its tokens.
    """
    for row in rows:
        _check_row(row)
    return _write(
        [
            _texts([row.group_id for row in rows]),
            _texts([row.prompt_key for row in rows]),
            _numbers([row.sample_index for row in rows], np.int32),
            _ragged([row.prompt_token_ids for row in rows], np.int32),
            _ragged([row.token_ids for row in rows], np.int32),
            _ragged([row.logprobs for row in rows], np.float32),
            _spans([row.spans for row in rows]),
            _texts([row.finish_reason.value for row in rows]),
            _numbers([row.reward for row in rows], np.float64),
            _numbers([row.advantage for row in rows], np.float64),
            _texts([row.failure for row in rows]),
        ],
        BATCH_SCHEMA,
        {_LEFT_OUT: "\n".join(f"{x.trajectories} {x.tokens} {x.group_id}" for x in left_out).encode()},
    )


def decode_batch(payload: bytes) -> list[BatchRow]:
    """Read the rows of a batch in their order; the inverse of `encode_batch`.

    Raises:
        IntegrityError: when the bytes are no batch table.
    """
    table = _read(payload, BATCH_SCHEMA)
    with _readable(payload, "batch"):
        return _batch_rows(table)


def decode_left_out(payload: bytes) -> list[LeftOut]:
    """Read what was left out of a batch.

    Raises:
        IntegrityError: when the bytes are no batch table.
    """
    table = _read(payload, BATCH_SCHEMA, columns=("group_id",))
    with _readable(payload, "batch"):
        found = [line.partition(b" ") for line in table.schema.metadata[_LEFT_OUT].splitlines()]
        pairs = [(int(trajectories), rest.partition(b" ")) for trajectories, _, rest in found]
        return [LeftOut(group_id.decode(), count, int(tokens)) for count, (tokens, _, group_id) in pairs]


def _batch_rows(table: Any) -> list[BatchRow]:
    plain = {name: table.column(name).to_pylist() for name in _BATCH_PLAIN}
    prompts = _split(table.column("prompt_token_ids"), np.int32)
    tokens = _split(table.column("token_ids"), np.int32)
    logprobs = _split(table.column("behaviour_logprobs"), np.float32)
    spans = table.column("spans").to_pylist()
    return [
        BatchRow(
            group_id=plain["group_id"][i],
            prompt_key=plain["prompt_key"][i],
            sample_index=plain["sample_index"][i],
            prompt_token_ids=prompts[i],
            token_ids=tokens[i],
            logprobs=logprobs[i],
            spans=tuple(VersionSpan(**span) for span in spans[i]),
            finish_reason=FinishReason(plain["finish_reason"][i]),
            reward=plain["reward"][i],
            advantage=plain["advantage"][i],
            failure=plain["failure"][i],
        )
        for i in range(table.num_rows)
    ]


def sampled_versions(payload: bytes) -> tuple[int, ...]:
    """Return the policy versions that sampled any token of a batch, ascending.

    Raises:
        IntegrityError: when the bytes are no batch table.
    """
    table = _read(payload, BATCH_SCHEMA, columns=("spans",))
    with _readable(payload, "batch"):
        spans = table.column("spans").combine_chunks().flatten()
        return tuple(sorted(set(spans.field("version").to_pylist())))


_BATCH_PLAIN = ("group_id", "prompt_key", "sample_index", "finish_reason", "reward", "advantage", "failure")


def encode_timings(rows: Sequence[RowTiming]) -> bytes:
    """Write the timings beside a batch as one Parquet file; no rows are fine."""
    columns = [_column_of([getattr(row, f.name) for row in rows], f) for f in TIMINGS_SCHEMA]
    return _write(columns, TIMINGS_SCHEMA)


def decode_timings(payload: bytes) -> list[RowTiming]:
    """Read the timings beside a batch; the inverse of `encode_timings`.

    Raises:
        IntegrityError: when the bytes are no timings table.
    """
    table = _read(payload, TIMINGS_SCHEMA)
    with _readable(payload, "timings"):
        return [RowTiming(**row) for row in table.to_pylist()]


def count_workers(payload: bytes) -> dict[str, int]:
    """Return how many trajectories of a timings file each worker sampled, by worker id.

    Raises:
        IntegrityError: when the bytes are no timings table.
    """
    table = _read(payload, TIMINGS_SCHEMA, columns=("worker_id",))
    with _readable(payload, "timings"):
        return dict(sorted(Counter(table.column("worker_id").to_pylist()).items()))


@contextmanager
def _readable(payload: bytes, name: str) -> Iterator[None]:
    """Say what is wrong with a file whose damage shows only now: a column's text, or a field's name.

    Raises:
        IntegrityError: instead of whatever reading raised.
    """
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise IntegrityError(
            f"{len(payload)} bytes are no readable {name} table: {' '.join(str(error).split())[:200]}; "
            "fetch the file again"
        ) from error


def _check_row(row: BatchRow) -> None:
    where = f"sample {row.sample_index} of group {row.group_id}"
    if row.token_ids.shape != row.logprobs.shape or row.token_ids.ndim != 1:
        raise ContractError(
            f"{where} has {row.token_ids.shape} tokens but {row.logprobs.shape} behaviour "
            "logprobs; the worker must send one per token"
        )
    check_cover(row.spans, 0, row.token_ids.size, where)


def _ragged(arrays: Sequence[IntArray] | Sequence[FloatArray], dtype: type[np.generic]) -> Any:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([array.size for array in arrays], out=offsets[1:])
    values = np.concatenate([*arrays, np.empty(0, dtype)]).astype(dtype, copy=False)
    kind = _list_of(pa.from_numpy_dtype(np.dtype(dtype)))
    return pa.ListArray.from_arrays(_numbers(offsets, np.int32), _numbers(values, dtype), type=kind)


def _spans(rows: Sequence[Sequence[VersionSpan]]) -> Any:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(spans) for spans in rows], out=offsets[1:])
    flat = [span for spans in rows for span in spans]
    values = pa.StructArray.from_arrays(
        [_column_of([getattr(span, f.name) for span in flat], f) for f in _SPAN], fields=list(_SPAN)
    )
    return pa.ListArray.from_arrays(_numbers(offsets, np.int32), values, type=_list_of(_SPAN))


_NUMBERS: dict[Any, type[np.generic]] = {
    pa.from_numpy_dtype(kind): kind for kind in (np.int32, np.int64, np.float64)
}


# pyarrow's own `array` and `to_numpy` would first import pandas: a quarter of a second of CPU for nothing.
def _texts(values: Sequence[str]) -> Any:
    encoded = [value.encode() for value in values]
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(value) for value in encoded], out=offsets[1:])
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def _numbers(values: Sequence[Any] | npt.NDArray[Any], dtype: type[np.generic]) -> Any:
    array = np.ascontiguousarray(values, dtype=dtype)
    kind = pa.from_numpy_dtype(array.dtype)
    return pa.Array.from_buffers(kind, array.size, [None, pa.py_buffer(array)])


def _column_of(values: Sequence[Any], field: Any) -> Any:
    """Return the column of a field; only in one that is nullable may a value be None."""
    if pa.types.is_string(field.type):
        return _texts(values)
    if pa.types.is_boolean(field.type):
        return pa.Array.from_buffers(field.type, len(values), [None, _bits(values)])
    known = [value is not None for value in values]
    if all(known):
        return _numbers(values, _NUMBERS[field.type])
    filled = _numbers([value or 0 for value in values], _NUMBERS[field.type])
    return pa.Array.from_buffers(field.type, len(values), [_bits(known), filled.buffers()[1]])


def _bits(values: Sequence[bool]) -> Any:
    return pa.py_buffer(np.packbits(np.asarray(values, dtype=np.bool_), bitorder="little"))


def _split(column: Any, dtype: type[np.generic]) -> list[npt.NDArray[Any]]:
    array = column.combine_chunks()
    values = _values(array.flatten(), dtype).copy()  # which may be written to
    lengths = _values(array.value_lengths(), np.int32)
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _values(array: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return the numbers of a column without nulls."""
    buffer = array.buffers()[1]
    found = np.empty(0, dtype) if buffer is None else np.frombuffer(buffer, dtype=dtype)
    return found[array.offset : array.offset + len(array)]


def _write(columns: Sequence[Any], schema: Any, facts: Mapping[bytes, bytes] | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.Table.from_arrays(list(columns), schema=schema)
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


def _read(payload: bytes, schema: Any, columns: Sequence[str] = ()) -> Any:
    name = schema.metadata[b"antiphon.table"].decode()
    with _readable(payload, name):
        file = pq.ParquetFile(pa.BufferReader(payload))
        names = file.schema_arrow.names
        table = file.read(columns=list(columns) or None, use_threads=False)
    found = (table.schema.metadata or {}).get(b"antiphon.table", b"").decode()
    if (found, names) != (name, schema.names):
        raise IntegrityError(
            f"a {found or 'foreign'} table with columns {names} was given where a {name} table "
            "is needed; pass the digest of the right file"
        )
    return table
