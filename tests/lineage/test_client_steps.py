"""Files of a client's calls and steps: read as written, equal records equal bytes, damage in one sentence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.client_records import (
    LOSSES,
    AdamParameters,
    CallResult,
    Datum,
    LoadOrder,
    SavedWeights,
    TrainingCall,
)
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.lineage.client_steps import (
    decode_call,
    decode_result,
    decode_step,
    encode_call,
    encode_result,
    encode_step,
    is_client_step,
)

NUMBERS = st.floats(width=32, allow_nan=True)
SOURCE = SavedWeights("run-1", "weights", "a")


@st.composite
def data(draw: st.DrawFn) -> Datum:
    length = draw(st.integers(0, 6))
    ids = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=length, max_size=length))
    targets = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=length, max_size=length))
    inputs = draw(
        st.dictionaries(st.text(max_size=5), st.lists(NUMBERS, min_size=length, max_size=length), max_size=3)
    )
    spans = draw(st.lists(st.tuples(st.text(max_size=5), *[st.integers(0, 9)] * 3), max_size=2))
    return Datum(
        np.array(ids, dtype=np.int32),
        np.array(targets, dtype=np.int64),
        {name: np.array(values, dtype=np.float32) for name, values in inputs.items()},
        tuple(spans),
    )


CALLS = st.builds(
    TrainingCall,
    st.sampled_from(LOSSES),
    st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=2),
    st.lists(data(), max_size=3).map(tuple),
    st.booleans(),
)
ORDERS = st.builds(AdamParameters, *[st.floats(allow_nan=False)] * 6)


def check_equal(one: TrainingCall, other: TrainingCall) -> None:
    assert (one.loss, dict(one.config), one.forward_only) == (
        other.loss,
        dict(other.config),
        other.forward_only,
    )
    for own, theirs in zip(one.data, other.data, strict=True):
        np.testing.assert_array_equal(own.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(own.targets, theirs.targets)
        assert own.inputs.keys() == theirs.inputs.keys() and own.sequences == theirs.sequences
        for name, values in own.inputs.items():
            np.testing.assert_array_equal(values, theirs.inputs[name])
            assert theirs.inputs[name].dtype == np.float32


@given(calls=st.lists(CALLS, max_size=3), adam=ORDERS)
def test_a_step_is_read_as_it_was_written(calls: list[TrainingCall], adam: AdamParameters) -> None:
    payload = encode_step(calls, adam)
    assert is_client_step(payload) and payload == encode_step(calls, adam)
    found = decode_step(payload)
    assert found.order == adam
    assert list(found.digests) == [digest_bytes(encode_call(call)) for call in calls]
    for one, other in zip(calls, found.calls, strict=True):
        check_equal(one, other)
        assert encode_call(other) == encode_call(one)


@given(call=CALLS, cut=st.floats(0, 1, exclude_max=True), changed=st.integers(0, 255), at=st.floats(0, 1))
def test_damage_is_an_integrity_error_or_another_call(
    call: TrainingCall, cut: float, changed: int, at: float
) -> None:
    payload = encode_call(call)
    with pytest.raises(IntegrityError, match="are no antiphon call 1"):
        decode_call(payload[: int(cut * len(payload))])
    with pytest.raises(IntegrityError, match="1 bytes are left over"):
        decode_call(payload + b"\0")
    damaged = bytearray(payload)
    damaged[int(at * (len(payload) - 1))] = changed
    try:
        decode_call(bytes(damaged))
    except IntegrityError:
        return
    assert not is_client_step(bytes(damaged))


def test_a_length_beyond_all_numbers_is_an_integrity_error() -> None:
    datum = b'{"inputs":[],"length":1e999,"sequences":[]}'
    header = b'{"config":{},"data":[' + datum + b'],"forward_only":false,"loss":"ppo"}'
    with pytest.raises(IntegrityError, match="infinity"):
        decode_call(b"antiphon call 1\n" + len(header).to_bytes(8, "little") + header)


@given(arrays=st.lists(st.lists(NUMBERS, max_size=5), max_size=4), metric=st.floats(allow_nan=False))
def test_a_result_is_read_as_it_was_written(arrays: list[list[float]], metric: float) -> None:
    result = CallResult(tuple(np.array(one, dtype=np.float32) for one in arrays), {"loss:sum": metric})
    found = decode_result(encode_result(result))
    assert found.metrics == result.metrics
    for one, other in zip(result.logprobs, found.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_load_has_no_calls() -> None:
    order = LoadOrder(SOURCE, True, "ab")
    assert decode_step(encode_step([], order)).order == order
    with pytest.raises(ContractError, match="loads weights takes no calls, but there are 1"):
        encode_step([TrainingCall("ppo", {}, ())], order)
    with pytest.raises(ContractError, match="datum 0 has 1 tokens, 2 targets, 1 weights; give as many"):
        one = np.zeros(1, np.float32)
        encode_call(
            TrainingCall("ppo", {}, (Datum(one.astype(np.int32), np.zeros(2, np.int64), {"weights": one}),))
        )
