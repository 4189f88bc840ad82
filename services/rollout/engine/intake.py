"""Intake: what an engine on a model's folder asks of requests and of weights."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.api.engine import EngineRequest
from antiphon.core.errors import ConfigError, ContractError, IntegrityError
from antiphon.models.codec import StopStrings, TextCodec
from antiphon.sampling.rules import check_sampling
from antiphon.weights.snapshot import VerifiedWeights


def check_weights(
    version: int,
    tensors: Mapping[str, Any],
    weights_digest: str,
    model_dir: Path,
    expected: Mapping[str, tuple[int, ...]],
) -> VerifiedWeights:
    """Return the tensors of a version, when they are what was announced and fit the model's folder.

    Args:
        version: for the words.
        tensors: checkpoint name -> tensor.
        weights_digest: what their digest must be.
        model_dir: the model's folder.
        expected: name -> shape of its tensors; a tied lm_head.weight may come along.

    Raises:
        ContractError: when nobody verified them.
        IntegrityError: when they are others.
    """
    if not isinstance(tensors, VerifiedWeights):
        raise ContractError(f"nobody verified the weights handed over as version {version}; verify them")
    missing = [name for name in expected if name not in tensors]
    unknown = [name for name in tensors if name not in expected and name != "lm_head.weight"]
    if missing or unknown:
        raise IntegrityError(
            f"the snapshot does not fit {model_dir}: {len(missing)} tensors missing "
            f"{missing[:3]}, {len(unknown)} unknown {unknown[:3]}; publish the model it was made from"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise IntegrityError(
                f"tensor {name} has shape {tuple(tensors[name].shape)}, but {model_dir} "
                f"has {shape}; publish the model it was made from"
            )
    if tensors.digest != weights_digest:
        raise IntegrityError(
            f"the weights handed over as version {version} have digest {tensors.digest}, not "
            f"{weights_digest}; fetch the snapshot again"
        )
    return tensors


def check_request(
    request: EngineRequest, in_flight: Collection[str], sampler: str, vocabulary_size: int, longest: int
) -> None:
    """Refuse a request that an engine with this sampler, vocabulary and longest sequence cannot sample.

    Raises:
        ContractError: for a repeated id or an impossible prompt.
        ConfigError: for sampling parameters that it cannot honour.
    """
    if request.request_id in in_flight:
        raise ContractError(f"request {request.request_id} is already in flight; ids must be unique")
    check_sampling(request.sampling, sampler)
    prompt = (*request.prompt_token_ids, *request.prefix_token_ids)
    if not request.prompt_token_ids or min(prompt) < 0 or max(prompt) >= vocabulary_size:
        raise ContractError(
            f"the prompt of request {request.request_id} must hold token ids in "
            f"[0, {vocabulary_size}), at least one; check the tokenizer"
        )
    if len(request.prefix_token_ids) >= request.sampling.max_tokens:
        raise ContractError(
            f"the prefix of request {request.request_id} has {len(request.prefix_token_ids)} tokens, but "
            f"sampling.max_tokens={request.sampling.max_tokens} leaves none to sample"
        )
    if not 0 <= request.seed < 1 << 64:
        raise ContractError(f"seed {request.seed} of request {request.request_id} is not unsigned 64-bit")
    if len(request.prompt_token_ids) + request.sampling.max_tokens > longest:
        raise ConfigError(
            f"a prompt of {len(request.prompt_token_ids)} tokens and "
            f"sampling.max_tokens={request.sampling.max_tokens} exceed "
            f"rollout.max_model_tokens={longest}; raise the latter"
        )


class StopTexts:
    """Finds where turns end by `sampling.stop`, with the tokenizer of a model's folder."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._known: dict[tuple[str, ...], StopStrings] = {}

    def turn_of(self, request: EngineRequest) -> "Turn | None":
        """Return what looks at a request's tokens; None where no text ends it."""
        texts = request.sampling.stop
        if not texts:
            return None
        if texts not in self._known:
            self._known[texts] = StopStrings(TextCodec.load(str(self._model_dir)), texts)
        return Turn(self._known[texts], request.prefix_token_ids[request.turn_begin :])


class Turn:
    """The tokens of one turn, looked at as they come."""

    def __init__(self, stops: StopStrings, begun: Sequence[int]) -> None:
        self._stops, self._tokens, self._looked = stops, list(begun), 0

    def end(self, sampled: Sequence[int]) -> int | None:
        """Return how many of all tokens sampled so far there are when a text is complete, if one is."""
        known = len(self._tokens)
        self._tokens += sampled[self._looked :]
        self._looked = len(sampled)
        end = self._stops.end(self._tokens, known)
        return None if end is None else self._looked - (len(self._tokens) - end)
