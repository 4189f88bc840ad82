"""What clients write is read as they meant it, and whatever else comes is refused in a sentence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from antiphon.core.client_records import CallResult
from antiphon.core.errors import ContractError
from antiphon.protos import tinker_pb2 as pb
from antiphon.services.door.wire import array_of, forward_backward_output, read_call, training_call
from tests.support.tinker_client import datum, training


@given(values=hnp.arrays(np.float32, st.integers(1, 20), elements=st.floats(-(2.0**40), 2.0**40, width=32)))
def test_bfloat16_is_the_upper_half_of_a_float32(values: np.ndarray) -> None:
    halves = (values.view(np.uint32) >> 16).astype("<u2")
    said = pb.Tensor(dense=halves.tobytes(), dtype=pb.DTYPE_BFLOAT16, shape=[values.size])
    found = array_of(said, "weights")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, values, rtol=2**-7, atol=1e-37)


@given(
    dense=hnp.arrays(np.int64, st.tuples(st.integers(0, 5), st.integers(1, 4)), elements=st.integers(-3, 3))
)
def test_sparse_tensors_are_read_whole(dense: np.ndarray) -> None:
    rows, columns = np.nonzero(dense)
    counts = np.bincount(rows, minlength=dense.shape[0]) if dense.shape[0] else np.empty(0, np.int64)
    said = pb.Tensor(dtype=pb.DTYPE_INT64, shape=dense.shape)
    said.sparse_csr.values = dense[rows, columns].astype("<i8").tobytes()
    said.sparse_csr.crow_indices = np.cumsum([0, *counts]).astype("<i8").tobytes()
    said.sparse_csr.col_indices = columns.astype("<i8").tobytes()
    np.testing.assert_array_equal(array_of(said, "targets"), dense)


@given(
    said=st.builds(
        pb.Tensor,
        dense=st.binary(max_size=24),
        dtype=st.sampled_from(list(pb.DType.values())),
        shape=st.lists(st.integers(-2, 1 << 40), max_size=3),
    ),
    csr=st.none() | st.tuples(st.binary(max_size=16), st.binary(max_size=32), st.binary(max_size=16)),
)
def test_no_tensor_breaks_the_door(said: pb.Tensor, csr: tuple[bytes, bytes, bytes] | None) -> None:
    if csr is not None:
        said.sparse_csr.values, said.sparse_csr.crow_indices, said.sparse_csr.col_indices = csr
    try:
        found = array_of(said, "weights")
    except ContractError as error:
        assert str(error).startswith("weights cannot be read")
    else:
        assert found.shape == tuple(said.shape) or not said.shape


@given(body=st.binary(max_size=200))
def test_no_body_breaks_the_door(body: bytes) -> None:
    try:
        training_call(read_call(body))
    except ContractError as error:
        assert str(error)


def test_both_maps_of_a_losss_numbers_are_read() -> None:
    said = read_call(training("m", 1, loss="ppo", loss_fn_config={"clip_low_threshold": 0.5}))
    said.loss_fn_config_v2["clip_high_threshold"].number = 1.5
    assert training_call(said).config == {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    said.loss_fn_config_v2["kind"].text = "x"
    with pytest.raises(ContractError, match="kind is a text"):
        training_call(said)


def test_spans_say_which_positions_were_sampled_here() -> None:
    one = datum(weights=[1, 1, 1])
    one.loss_fn_input_spans.add().prompt_tokens.length = 1
    span = one.loss_fn_input_spans.add().sampled_tokens
    span.sequence_id, span.offset, span.length = "s:0/1", 4, 2
    (found,) = training_call(read_call(training("m", 1, one))).data
    assert found.sequences == (("s:0/1", 4, 1, 2),)


@given(lengths=st.lists(st.integers(0, 6), max_size=5))
def test_arrays_of_datums_are_told_end_to_end(lengths: list[int]) -> None:
    arrays = tuple(np.arange(size, dtype=np.float32) + place for place, size in enumerate(lengths))
    said = pb.ForwardBackwardOutput.FromString(forward_backward_output(CallResult(arrays, {"loss:sum": 1.0})))
    (record,) = said.loss_fn_outputs
    field = record.fields["logprobs"]
    ends = np.frombuffer(field.offsets, "<i8") // 4
    data = np.frombuffer(field.data, "<f4")
    assert record.num_datums == len(arrays) and said.metrics["loss:sum"] == 1.0
    for place, one in enumerate(arrays):
        np.testing.assert_array_equal(data[ends[place] : ends[place + 1]], one)
