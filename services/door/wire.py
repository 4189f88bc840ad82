"""Wire: what clients say and hear, as their SDK (0.25 to 0.38) writes and reads it.

JSON bodies are the classes here, protobuf bodies those of protos/tinker.proto. What a client says
becomes records; what cannot be is refused in a sentence that the client shows. Nothing here waits.

Legend: T positions of one datum, P prompt tokens, K most probable tokens of a place.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BaseModel, Field

from antiphon.core.client_records import (
    AdamParameters,
    CallResult,
    Datum,
    SampledReply,
    Scores,
    TrainingCall,
)
from antiphon.core.config_sections import YEAR_S
from antiphon.core.errors import ContractError
from antiphon.core.records import FinishReason, FloatArray, SamplingParameters
from antiphon.core.seeds import derive_seed
from antiphon.protos import tinker_pb2 as pb

OLDEST_SDK, NEWEST_SDK = (0, 25), (0, 38)
"""The oldest and the newest version of the SDK that were tried."""
MOST_SAMPLES = 1024
"""Most completions of one request."""
MOST_CELLS = 1 << 22
"""Most numbers of a sparse tensor, zeros included, and of the most probable tokens in one answer."""
MASKED = -99_999.0
"""What clients take for no log-probability, in lists of the most probable tokens."""
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_TYPES = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4", pb.DTYPE_BFLOAT16: "<u2"}

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Sequence_ = Annotated[int, Field(ge=0, lt=1 << 62)]


class NewSession(BaseModel):
    """`create_session`."""

    sdk_version: str = ""
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class OfSession(BaseModel):
    """`session_heartbeat`."""

    session_id: str


class Adapters(BaseModel):
    """What a client wants trained; every one of today's asks for adapters."""

    rank: int = Field(default=32, ge=1, le=1 << 20)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(BaseModel):
    """Which optimizer a model has."""

    type: str = "adam"


class NewModel(OfSession):
    """`create_model`."""

    model_seq_id: Sequence_
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: Adapters = Adapters()
    optimizer_config: Optimizer = Optimizer()


class OfModel(BaseModel):
    """`get_info`, `unload_model`."""

    model_id: str


class InOrder(OfModel):
    """A call that changes a model: those of a model are done in the order of `seq_id`, which begins at 1."""

    seq_id: Annotated[int, Field(ge=1, lt=1 << 62)]


class Adam(BaseModel):
    """Parameters of a step."""

    type: Literal["adam", "adamw"] = "adamw"
    learning_rate: Annotated[Number, Field(ge=0.0)] = 1e-4
    beta1: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.95
    eps: Annotated[Number, Field(ge=0.0)] = 1e-12
    weight_decay: Annotated[Number, Field(ge=0.0)] = 0.0
    grad_clip_norm: Number = 0.0

    def record(self) -> AdamParameters:
        """Return them as a run takes them."""
        given = self.model_dump(exclude={"type"})
        return AdamParameters(**given | {"grad_clip_norm": max(0.0, self.grad_clip_norm)})


class Step(InOrder):
    """`optim_step`."""

    adam_params: Adam = Adam()


class SaveWeights(InOrder):
    """`save_weights`."""

    path: Annotated[str, Field(pattern=_NAME)] | None = None
    ttl_seconds: Annotated[float, Field(gt=0.0, le=100 * YEAR_S)] | None = None
    overwrite: bool = False


class SaveForSampler(SaveWeights):
    """`save_weights_for_sampler`: under a name, or for one sampling session."""

    sampling_session_seq_id: Sequence_ | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    overwrite: bool = True


class LoadWeights(BaseModel):
    """`load_weights`: into a new model of a session, or into one that is there."""

    path: str
    optimizer: bool = False
    session_id: str | None = None
    model_seq_id: Sequence_ | None = None
    model_id: str | None = None
    seq_id: Annotated[int, Field(ge=1, lt=1 << 62)] | None = None
    user_metadata: dict[str, Any] | None = None


class WeightsInfo(BaseModel):
    """`weights_info`."""

    tinker_path: str


class NewSampler(OfSession):
    """`create_sampling_session`."""

    sampling_session_seq_id: Sequence_
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(BaseModel):
    """A piece of a prompt."""

    type: str = "encoded_text"
    tokens: list[TokenId] = []


class Prompt(BaseModel):
    """What stands before the completion."""

    chunks: list[PromptChunk]


class Sampling(BaseModel):
    """How a client wants tokens drawn."""

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    seed: int | None = None
    stop: str | list[TokenId] | list[str] | None = None
    temperature: Annotated[Number, Field(ge=0.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    top_p: Annotated[Number, Field(gt=0.0, le=1.0)] = 1.0


class Sample(BaseModel):
    """`asample`."""

    sampling_session_id: str
    seq_id: Sequence_
    num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    prompt: Prompt
    sampling_params: Sampling = Sampling()
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    prompt_alt_tokens_k: int = 0
    target_prompt_logprobs: Any = None

    def tokens(self) -> tuple[int, ...]:
        """Return the prompt.

        Raises:
            ContractError: for what is no text, or asked for and not served.
        """
        for chunk in self.prompt.chunks:
            if chunk.type != "encoded_text":
                raise ContractError(
                    f"the prompt has a chunk of type {chunk.type[:40]}; only encoded_text is served here"
                )
        if self.prompt_alt_tokens_k or self.target_prompt_logprobs is not None:
            name = "prompt_alt_tokens_k" if self.prompt_alt_tokens_k else "target_prompt_logprobs"
            raise ContractError(f"{name} is not served here; leave it out")
        tokens = tuple(token for chunk in self.prompt.chunks for token in chunk.tokens)
        if not tokens:
            raise ContractError("the prompt has no tokens; give at least one")
        return tokens

    def parameters(self, room: int) -> SamplingParameters:
        """Return how tokens are drawn where `room` tokens fit behind the prompt.

        Raises:
            ContractError: when there is no room, or the end token should not end.
        """
        asked, stop = self.sampling_params, self.sampling_params.stop
        if stop == []:
            raise ContractError(
                "stop=[] asks to go on behind the end token, which is not served; leave stop out"
            )
        most = room if asked.max_tokens is None else asked.max_tokens
        if not 1 <= most <= room:
            raise ContractError(
                f"the prompt leaves room for {max(0, room)} tokens, but max_tokens is {most}; lower it, "
                "shorten the prompt, or serve with a larger rollout.max_model_tokens"
            )
        stops = [stop] if isinstance(stop, str) else stop or []
        return SamplingParameters(
            temperature=asked.temperature,
            top_k=max(0, asked.top_k),
            top_p=asked.top_p,
            max_tokens=most,
            stop=tuple(one for one in stops if isinstance(one, str)),
            stop_token_ids=tuple(one for one in stops if isinstance(one, int)),
        )

    def check_tops(self, sampled: int) -> None:
        """Check that the most probable tokens of the prompt and of all `sampled` tokens fit an answer.

        Raises:
            ContractError: when they do not.
        """
        prompt = sum(len(chunk.tokens) for chunk in self.prompt.chunks)
        cells = prompt * self.topk_prompt_logprobs + sampled * self.topk_sample_logprobs
        if cells > MOST_CELLS:
            raise ContractError(
                f"topk_prompt_logprobs and topk_sample_logprobs ask for {cells} log-probabilities, more than "
                f"the {MOST_CELLS} of one answer; ask for fewer"
            )

    def seeds(self) -> tuple[int, ...]:
        """Return the seed of each completion: made from the client's own, or from session and seq_id."""
        given = self.sampling_params.seed
        parts = (self.sampling_session_id, self.seq_id) if given is None else (given,)
        return tuple(derive_seed("door", *parts, place) for place in range(self.num_samples))


class Retrieve(BaseModel):
    """`retrieve_future`."""

    request_id: str


def text(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what a client says of itself as texts."""
    return {str(name): str(value) for name, value in (metadata or {}).items()}


def sdk_warning(version: str) -> str:
    """Say that a version of the SDK is one that was not tried; "" for one that was.

    >>> sdk_warning("0.38.0"), sdk_warning("0.99.1")[:30]
    ('', 'SDK 0.99.1 was not tried here;')
    """
    parts = version.split(".")[:2]
    known = len(parts) == 2 and all(one.isdigit() for one in parts)
    if known and OLDEST_SDK <= (int(parts[0]), int(parts[1])) <= NEWEST_SDK:
        return ""
    first, last = (".".join(map(str, one)) for one in (OLDEST_SDK, NEWEST_SDK))
    return f"SDK {version[:40] or 'without a version'} was not tried here; {first} to {last} were"


def read_call(body: bytes) -> pb.ForwardBackwardRequest:
    """Return a call for a loss.

    Raises:
        ContractError: when it is none.
    """
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise ContractError("the body is no ForwardBackwardRequest; use SDK 0.38") from None


def array_of(tensor: pb.Tensor, name: str) -> np.ndarray[Any, Any]:
    """Return a tensor as an array of its shape, of int64, int32 or float32.

    Raises:
        ContractError: when its bytes are not those of its type and shape.
    """
    kind = _TYPES.get(tensor.dtype)
    shape, csr = tuple(tensor.shape), tensor.sparse_csr
    sparse = tensor.HasField("sparse_csr")
    try:
        if kind is None or any(size < 0 for size in shape):
            raise ValueError(f"type {tensor.dtype}, shape {list(shape)}")
        values = np.frombuffer(csr.values if sparse else tensor.dense, dtype=kind)
        if tensor.dtype == pb.DTYPE_BFLOAT16:  # the upper half of a float32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        if not sparse:
            return values.reshape(shape or (-1,))
        rows, columns = np.frombuffer(csr.crow_indices, "<i8"), np.frombuffer(csr.col_indices, "<i8")
        if len(shape) != 2 or math.prod(shape) > MOST_CELLS or rows.size != shape[0] + 1:
            raise ValueError(f"sparse, of shape {list(shape)}")
        counts = np.diff(rows)
        if rows[0] != 0 or rows[-1] != values.size or (counts < 0).any() or columns.size != values.size:
            raise ValueError("sparse, with wrong indices")
        if values.size and (columns.min() < 0 or columns.max() >= shape[1]):
            raise ValueError("sparse, with wrong columns")
        full = np.zeros(shape, dtype=values.dtype)
        full[np.repeat(np.arange(shape[0]), counts), columns] = values
        return full
    except ValueError as error:
        raise ContractError(
            f"{name} cannot be read ({error}); give a tensor of the shape that it names"
        ) from None


def training_call(said: pb.ForwardBackwardRequest) -> TrainingCall:
    """Return what a client asks to be trained on; whether it can be is the learner's to say.

    Raises:
        ContractError: naming the datum that cannot be read.
    """
    config = dict(said.loss_fn_config)
    for name, value in said.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise ContractError(f"loss_fn_config {name[:60]} is a text; only numbers are served here")
        config[name] = value.number
    data = tuple(_datum(one, f"datum {place}") for place, one in enumerate(said.data))
    return TrainingCall(said.loss_fn, config, data, said.forward_only)


def _datum(said: pb.Datum, where: str) -> Datum:
    parts = [np.empty(0, np.int32)]
    for chunk in said.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text" or len(chunk.encoded_text.tokens) % 4:
            raise ContractError(f"{where} has a chunk that is no encoded_text; only text is served here")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    inputs = {}
    for name, tensor in said.loss_fn_inputs.items():
        found = array_of(tensor, f"{where}: {name[:60]}")
        found = found[:, 0] if found.shape[1:] == (1,) else found
        if found.ndim != 1:
            shape = list(found.shape)
            raise ContractError(f"{where}: {name[:60]} has shape {shape}; give one number for each position")
        inputs[name] = found
    targets = inputs.pop("target_tokens", None)
    if targets is None or targets.dtype.kind != "i":
        raise ContractError(f"{where} has no target_tokens of int64; give the token that follows each")
    floats = {name: found.astype(np.float32) for name, found in inputs.items()}
    return Datum(np.concatenate(parts), targets.astype(np.int64), floats, _spans(said.loss_fn_input_spans))


def _spans(spans: Sequence[pb.ProvenanceSpan]) -> tuple[tuple[str, int, int, int], ...]:
    """Return which positions were sampled here; spans tile a datum in order."""
    found, at = [], 0
    for span in spans:
        one = span.sampled_tokens if span.WhichOneof("span") == "sampled_tokens" else span.prompt_tokens
        if span.WhichOneof("span") == "sampled_tokens" and one.length > 0:
            found.append((one.sequence_id, one.offset, at, one.length))
        at += one.length
    return tuple(found)


def forward_backward_output(result: CallResult) -> bytes:
    """Return what a client hears of a call."""
    said = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(result.metrics))
    record = said.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(result.logprobs))
    arrays = [np.ascontiguousarray(one, dtype="<f4") for one in result.logprobs]
    ends = np.cumsum([0, *(one.nbytes for one in arrays)], dtype="<i8")
    field = record.fields["logprobs"]
    field.data, field.offsets = b"".join(one.tobytes() for one in arrays), ends.tobytes()
    field.dtype = pb.DTYPE_FLOAT32
    return said.SerializeToString()


def sample_response(
    reply: SampledReply,
    prompt: FloatArray | None = None,
    prompt_top: Scores | None = None,
    sample_tops: Sequence[Scores] = (),
) -> bytes:
    """Return what a client hears of a request.

    Args:
        reply: the completions.
        prompt: [P] log-probabilities of the prompt, nats, NaN where there is none.
        prompt_top: with the most probable tokens of each place of the prompt.
        sample_tops: of each completion, with those of each of its tokens.
    """
    said = pb.SampleResponse(prompt_cache_hit_tokens=reply.cached_tokens)
    for place, one in enumerate(reply.trajectories):
        ended = one.finish_reason is FinishReason.STOP
        sequence = said.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if ended else pb.STOP_REASON_LENGTH,
            tokens=one.token_ids.astype("<i4", copy=False).tobytes(),
            logprobs=one.logprobs.astype("<f4", copy=False).tobytes(),
        )
        if sample_tops:
            sequence.topk_sampled_logprobs.CopyFrom(_most_probable(sample_tops[place]))
    if prompt is not None:
        said.prompt_logprobs = prompt.astype("<f4", copy=False).tobytes()
    if prompt_top is not None:
        said.topk_prompt_logprobs.CopyFrom(_most_probable(prompt_top))
    return said.SerializeToString()


def last_of(scores: Scores, count: int | None) -> Scores:
    """Return scores of the last `count` places alone, the others NaN; None: of all."""
    if count is None or count >= scores.logprobs.size:
        return scores
    logprobs, top = scores.logprobs.copy(), scores.top_logprobs.copy()
    logprobs[:-count] = np.nan
    top[:-count] = np.nan
    return Scores(logprobs, scores.top_ids, top)


def behind(scores: Scores, prompt: int) -> Scores:
    """Return scores of what stands behind the first `prompt` tokens."""
    return Scores(scores.logprobs[prompt:], scores.top_ids[prompt:], scores.top_logprobs[prompt:])


def _most_probable(scores: Scores) -> pb.TopkLogprobs:
    missing = np.isnan(scores.top_logprobs) | (scores.top_ids < 0)
    return pb.TopkLogprobs(
        token_ids=np.where(missing, 0, scores.top_ids).astype("<i4").tobytes(),
        logprobs=np.where(missing, MASKED, scores.top_logprobs).astype("<f4").tobytes(),
        k=scores.top_ids.shape[1],
        length=scores.top_ids.shape[0],
    )
