"""Client steps: what a client asks a learner to train on, as files whose digests name them.

A call file is one `TrainingCall`, a result file one `CallResult`. A step file is the calls of one step in
order, each as the bytes of its call file, with the Adam parameters of the step, or the order to load saved
weights; it stands where another run has a batch file, and holds all that the step depends on. Each is a line
of magic, the length of a JSON header, the header, and the arrays that the header lists, little-endian: equal
records give equal bytes, and nothing in them can be run.

Legend: T positions of one datum.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import SEEK_END, BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from antiphon.core.client_checks import counts, weight_of
from antiphon.core.client_records import (
    AdamParameters,
    CallResult,
    Datum,
    LoadOrder,
    SavedWeights,
    TrainingCall,
)
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.records import BatchRow, FinishReason, FloatArray, VersionSpan

_CALL, _RESULT, _STEP = (b"antiphon %s 1\n" % kind for kind in (b"call", b"result", b"step"))
_LENGTH = 8
"""Bytes of the length of a header."""
_INT32, _INT64, _FLOAT32 = (np.dtype(name) for name in ("<i4", "<i8", "<f4"))


@dataclass(frozen=True, slots=True, eq=False)
class ClientStep:
    """What a step file says."""

    calls: tuple[TrainingCall, ...]
    digests: tuple[str, ...]
    """Of the call files of these calls."""
    order: AdamParameters | LoadOrder


def encode_call(call: TrainingCall) -> bytes:
    """Return a call as the bytes of its file.

    Raises:
        ContractError: when the arrays of a datum have no one length, which no file can say.
    """
    arrays: list[npt.NDArray[Any]] = []
    data = []
    for place, datum in enumerate(call.data):
        lengths = {len(datum.token_ids), len(datum.targets), *map(len, datum.inputs.values())}
        if len(lengths) != 1:
            raise ContractError(
                f"datum {place} has {len(datum.token_ids)} tokens, {len(datum.targets)} targets"
                f"{''.join(f', {len(one)} {name}' for name, one in sorted(datum.inputs.items()))}; give as "
                "many of each"
            )
        names = sorted(datum.inputs)
        data.append({"length": lengths.pop(), "inputs": names, "sequences": datum.sequences})
        arrays += [datum.token_ids.astype(_INT32), datum.targets.astype(_INT64)]
        arrays += [datum.inputs[name].astype(_FLOAT32) for name in names]
    header = {
        "loss": call.loss,
        "config": {name: float(value) for name, value in call.config.items()},
        "forward_only": call.forward_only,
        "data": data,
    }
    return _file(_CALL, header, arrays)


def decode_call(payload: bytes) -> TrainingCall:
    """Read a call file; the inverse of `encode_call`.

    Raises:
        IntegrityError: when the bytes are none.
    """
    with _reading(payload, _CALL) as (header, body):
        data = []
        for one in header["data"]:
            length = int(one["length"])
            token_ids, targets = _array(body, _INT32, length), _array(body, _INT64, length)
            inputs = {str(name): _array(body, _FLOAT32, length) for name in one["inputs"]}
            spans = tuple((str(name), int(a), int(b), int(n)) for name, a, b, n in one["sequences"])
            data.append(Datum(token_ids, targets, inputs, spans))
        config = {str(name): float(value) for name, value in header["config"].items()}
        return TrainingCall(str(header["loss"]), config, tuple(data), bool(header["forward_only"]))


def encode_result(result: CallResult) -> bytes:
    """Return the result of a call as the bytes of its file."""
    header = {
        "lengths": [len(one) for one in result.logprobs],
        "metrics": {name: float(value) for name, value in result.metrics.items()},
    }
    return _file(_RESULT, header, [one.astype(_FLOAT32) for one in result.logprobs])


def decode_result(payload: bytes) -> CallResult:
    """Read a result file; the inverse of `encode_result`.

    Raises:
        IntegrityError: when the bytes are none.
    """
    with _reading(payload, _RESULT) as (header, body):
        found: list[FloatArray] = [_array(body, _FLOAT32, int(length)) for length in header["lengths"]]
        return CallResult(tuple(found), {str(name): float(x) for name, x in header["metrics"].items()})


def encode_step(calls: Sequence[TrainingCall], order: AdamParameters | LoadOrder) -> bytes:
    """Return a step as the bytes of its file: all calls since the step before, in order.

    Raises:
        ContractError: as `encode_call`, or when a step that loads weights has calls.
    """
    if isinstance(order, LoadOrder) and calls:
        raise ContractError(f"a step that loads weights takes no calls, but there are {len(calls)}")
    files = [encode_call(call) for call in calls]
    kind = "load" if isinstance(order, LoadOrder) else "adam"
    header = {"lengths": [len(one) for one in files], kind: asdict(order)}
    return _file(_STEP, header, files)


def decode_step(payload: bytes) -> ClientStep:
    """Read a step file; the inverse of `encode_step`.

    Raises:
        IntegrityError: when the bytes are none.
    """
    with _reading(payload, _STEP) as (header, body):
        files = [_take(body, int(length)) for length in header["lengths"]]
        order: AdamParameters | LoadOrder
        if "load" in header:
            source = SavedWeights(**header["load"].pop("source"))
            order = LoadOrder(source=source, **header["load"])
        else:
            order = AdamParameters(**{name: float(value) for name, value in header["adam"].items()})
        return ClientStep(tuple(map(decode_call, files)), tuple(map(digest_bytes, files)), order)


def is_client_step(payload: bytes) -> bool:
    """Return whether the file of a batch is a client's step instead."""
    return payload.startswith(_STEP)


def loads_weights(payload: bytes) -> bool:
    """Return whether the file of a batch is a client's step that loads saved weights."""
    if not is_client_step(payload):
        return False
    with _reading(payload, _STEP) as (header, body):
        body.seek(0, SEEK_END)  # its calls may be large, and are not asked for
        return "load" in header


def rows_of(payload: bytes, step: int) -> list[BatchRow]:
    """Return the data of a step file as rows that people read, one for each datum that trained.

    The prompt is what stands before the first position that counts, the completion all targets from there
    to the last such position; where a client named the sequences that it sampled, the row has the first one's
    id as prompt key. A client keeps its rewards to itself: the mean weight or advantage stands for them. Nor
    does the file say which version sampled them: that of the step stands for it.

    Raises:
        IntegrityError: when the bytes are no step file.
    """
    rows = []
    for number, call in enumerate(decode_step(payload).calls):
        for place, datum in enumerate(call.data):
            weight = weight_of(call.loss, datum)
            counted = np.flatnonzero(counts(call.loss, datum))
            if not counted.size:
                continue
            first, stop = int(counted[0]), int(counted[-1]) + 1
            logprobs = datum.inputs.get("logprobs", np.zeros(len(weight), np.float32))
            mean = float(weight[counted].astype(np.float64).mean())
            rows.append(
                BatchRow(
                    datum.targets[first:stop].astype(np.int32),
                    logprobs[first:stop],
                    (VersionSpan(step, 0, stop - first),),
                    FinishReason.STOP,
                    group_id=f"call-{number}",
                    prompt_key=datum.sequences[0][0] if datum.sequences else f"{number}.{place}",
                    sample_index=place,
                    prompt_token_ids=datum.token_ids[: first + 1],
                    reward=mean,
                    advantage=mean,
                )
            )
    return rows


def _take(body: BytesIO, length: int) -> bytes:
    found = body.read(length)
    if len(found) != length:
        raise ValueError(f"{length} bytes are listed where {len(found)} are left")
    return found


def _array(body: BytesIO, dtype: np.dtype[Any], length: int) -> Any:
    return np.frombuffer(_take(body, length * dtype.itemsize), dtype).astype(dtype.type)


def _file(magic: bytes, header: dict[str, Any], parts: Sequence[Any]) -> bytes:
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    written = [part if isinstance(part, bytes) else part.tobytes() for part in parts]
    return b"".join([magic, len(text).to_bytes(_LENGTH, "little"), text, *written])


@contextmanager
def _reading(payload: bytes, magic: bytes) -> Iterator[tuple[dict[str, Any], BytesIO]]:
    """Yield the header of a file and what stands behind it; whatever reading raises is an IntegrityError."""
    kind, body = magic.decode().strip(), BytesIO(payload)
    try:
        if (found := body.read(len(magic))) != magic:
            raise ValueError(f"they begin with {found!r}")
        length = int.from_bytes(body.read(_LENGTH), "little")
        yield json.loads(_take(body, length)), body
        if left := len(payload) - body.tell():
            raise ValueError(f"{left} bytes are left over")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        words = " ".join(str(error).split())[:200]
        raise IntegrityError(f"{len(payload)} bytes are no {kind}: {words}; fetch the file again") from error
