"""Tables of rollouts: equal rows give equal bytes, and what is read is what was written."""

import dataclasses
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.records import BatchRow, FinishReason, RowTiming, VersionSpan
from antiphon.lineage.rollout_table import (
    LeftOut,
    decode_batch,
    decode_timings,
    encode_batch,
    encode_timings,
    read_batch,
)
from tests.support.branched_rows import row_of, stories


@st.composite
def batch_rows(draw: st.DrawFn) -> BatchRow:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12))
    logprob = st.floats(-80, 0, width=32)
    cut = draw(st.integers(0, len(tokens) - 1))
    version = draw(st.integers(0, 2**40))
    spans = [VersionSpan(version, 0, cut)] if cut else []
    return BatchRow(
        group_id=draw(st.text(min_size=1, max_size=8)),
        prompt_key=draw(st.text(max_size=8)),
        sample_index=draw(st.integers(0, 1023)),
        prompt_token_ids=np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), max_size=6)), dtype=np.int32),
        token_ids=np.asarray(tokens, dtype=np.int32),
        logprobs=np.asarray(
            draw(st.lists(logprob, min_size=len(tokens), max_size=len(tokens))), dtype=np.float32
        ),
        spans=(*spans, VersionSpan(version + 1, cut, len(tokens))),
        finish_reason=draw(st.sampled_from(FinishReason)),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        advantage=draw(st.floats(allow_nan=False, allow_infinity=False)),
        said=draw(st.just("") | st.text(max_size=8)),
    )


def plain(row: BatchRow) -> dict[str, object]:
    values = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    return {name: (v.dtype, v.tobytes()) if isinstance(v, np.ndarray) else v for name, v in values.items()}


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(batch_rows(), max_size=5))
def test_rows_come_back_bit_for_bit_and_in_order(rows: list[BatchRow]) -> None:
    left_out = [LeftOut("s000001-g002", len(rows), 7), LeftOut("s000001-g001", 0, 0)]
    payload = encode_batch(rows, left_out)
    back = decode_batch(payload)
    assert [plain(row) for row in back] == [plain(row) for row in rows]
    assert read_batch(payload)[1] == left_out
    assert encode_batch(back, left_out) == payload == encode_batch(rows, left_out)
    assert encode_batch(rows) != payload or not rows


@settings(max_examples=40, deadline=None)
@given(told=st.lists(stories(), max_size=4))
def test_breaks_come_back_and_only_where_there_are_some_is_there_a_column(told: list) -> None:
    rows = [row_of(story) for story in told]
    nothing = {"token_ids": np.empty(0, np.int32), "logprobs": np.empty(0, np.float32), "spans": ()}
    failed = [
        dataclasses.replace(row, **nothing, observed=(), breaks=(), failure="it broke") for row in rows[:1]
    ]
    payload = encode_batch([*rows, *failed])
    assert [plain(row) for row in decode_batch(payload)] == [plain(row) for row in (*rows, *failed)]
    columns = pq.read_table(pa.BufferReader(payload)).column_names
    assert ("breaks" in columns) == any(row.breaks for row in rows)
    assert ("observed" in columns) == any(row.observed for row in rows)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.builds(
            RowTiming,
            group_id=st.text(max_size=6),
            sample_index=st.integers(0, 99),
            worker_id=st.text(max_size=6),
            lease_id=st.text(max_size=6),
            attempt=st.integers(1, 9),
            generation_s=st.floats(0, 1e6),
            leased_at_s=st.floats(0, 1e6),
            submitted_at_s=st.floats(0, 1e6),
            rewarded_at_s=st.floats(0, 1e6),
            passes=st.none() | st.integers(0, 2**40),
            drafted=st.none() | st.integers(0, 2**40),
            said=st.just("") | st.text(max_size=8),
        ),
        max_size=5,
    )
)
def test_timings_come_back(rows: list[RowTiming]) -> None:
    payload = encode_timings(rows)
    assert decode_timings(payload) == rows
    assert encode_timings(rows) == payload


def test_an_empty_batch_is_a_table_too() -> None:
    assert decode_batch(encode_batch([])) == []
    assert decode_timings(encode_timings([])) == []


def row(**changes: object) -> BatchRow:
    base = BatchRow(
        group_id="g0",
        prompt_key="train/0/1",
        sample_index=0,
        prompt_token_ids=np.arange(4, dtype=np.int32),
        token_ids=np.arange(3, dtype=np.int32),
        logprobs=np.zeros(3, dtype=np.float32),
        spans=(VersionSpan(0, 0, 3),),
        finish_reason=FinishReason.STOP,
        reward=1.0,
        advantage=0.5,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": np.zeros(2, dtype=np.float32)}, "one per token"),
        ({"spans": (VersionSpan(0, 0, 2),)}, "without gaps"),
        ({"spans": (VersionSpan(0, 0, 1), VersionSpan(1, 2, 3))}, "without gaps"),
        ({"spans": ()}, "without gaps"),
    ],
)
def test_a_row_that_does_not_fit_itself_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ContractError, match=words):
        encode_batch([row(**changes)])


def test_order_is_part_of_the_digest() -> None:
    first, second = row(), row(sample_index=1)
    assert encode_batch([first, second]) != encode_batch([second, first])


def test_another_process_writes_the_same_bytes() -> None:
    """Nothing of the host, the process or the clock is in the file."""
    script = (
        "import sys, numpy as np\n"
        "from antiphon.core.digests import digest_bytes\n"
        "from antiphon.core.records import BatchRow, FinishReason, VersionSpan\n"
        "from antiphon.lineage.rollout_table import encode_batch\n"
        "r = BatchRow(np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32), (VersionSpan(0, 0, 3),),\n"
        "    FinishReason.STOP, group_id='g0', prompt_key='train/0/1', sample_index=0,\n"
        "    prompt_token_ids=np.arange(4, dtype=np.int32), reward=1.0, advantage=0.5)\n"
        "print(digest_bytes(encode_batch([r])))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == digest_bytes(encode_batch([row()]))


def test_foreign_bytes_are_no_table() -> None:
    with pytest.raises(IntegrityError, match="no readable batch/4 table"):
        decode_batch(b"PAR1 or not")
    with pytest.raises(IntegrityError, match="timings/2 table"):
        decode_timings(encode_batch([row()]))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": [1]}), sink)
    with pytest.raises(IntegrityError, match="foreign table"):
        decode_batch(bytes(sink.getvalue()))


def test_truncated_bytes_are_no_table() -> None:
    payload = encode_batch([row()])
    with pytest.raises(IntegrityError):
        decode_batch(payload[:-9])


@pytest.mark.parametrize(("there", "instead"), [(b"version", b"versinn"), (b"group-1", b"g\xffoup-1")])
def test_a_flipped_bit_within_a_name_or_a_text_is_an_integrity_error(there: bytes, instead: bytes) -> None:
    payload = encode_batch([row(group_id="group-1")])
    assert there in payload
    with pytest.raises(IntegrityError, match="no readable batch/4 table"):
        decode_batch(payload.replace(there, instead))


def test_decoded_arrays_may_be_written_to() -> None:
    (back,) = decode_batch(encode_batch([row()]))
    back.token_ids[0] = 7


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(batch_rows(), min_size=1, max_size=4))
def test_a_reference_is_a_column_of_its_own_and_leaves_other_files_as_they_are(rows: list[BatchRow]) -> None:
    bare = encode_batch(rows)
    assert all(row.reference_logprobs is None for row in decode_batch(bare))
    referred = [dataclasses.replace(row, reference_logprobs=row.logprobs - 1) for row in rows]
    found = decode_batch(encode_batch(referred))
    assert [plain(row) for row in found] == [plain(row) for row in referred]
    stripped = [dataclasses.replace(row, reference_logprobs=None) for row in found]
    assert encode_batch(stripped) == bare
    with pytest.raises(ContractError, match="reference logprobs"):
        encode_batch([*referred, rows[0]])
