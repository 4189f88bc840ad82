"""LightEngine: the Engine protocol on a toy distribution, deterministic from weights and seed.

The token at a position is an inverse-CDF draw with a uniform that depends on (seed, position)
alone, as the keyed sampler does it; the distribution depends on the loaded tensor `bias`, so
other weights give other tokens. Token 0 ends a completion.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from antiphon.api.engine import ALL_ABILITIES, EngineOutput, EngineProgress, EngineRequest
from antiphon.core.errors import ContractError
from antiphon.core.records import FinishReason, VersionSpan
from antiphon.core.seeds import derive_seed
from antiphon.core.spans import merged

VOCABULARY = 16
END_TOKEN = 0


@dataclass
class _Live:
    request: EngineRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class LightEngine:
    """Not thread-safe: its owner's thread drives it."""

    vocabulary_size = VOCABULARY
    abilities = ALL_ABILITIES
    continues = True
    numerics = "light"

    def __init__(self, before_step: Callable[[], None] | None = None, drafts: bool = False) -> None:
        """Start without weights.

        Args:
            before_step: called in the engine's thread before each step.
            drafts: say so; the engine only notes the requests that it got.
        """
        self.drafts = drafts
        self.requests: list[EngineRequest] = []
        self.version: int | None = None
        self.weights_digest: str | None = None
        self.loaded: list[int] = []
        self.closed = False
        self._bias = np.zeros(VOCABULARY)
        self._live: dict[str, _Live] = {}
        self._before_step = before_step

    @property
    def unfinished(self) -> int:
        return len(self._live)

    def load_weights(
        self, version: int, tensors: Mapping[str, npt.NDArray[np.float64]], weights_digest: str
    ) -> None:
        self._bias = np.asarray(tensors["bias"], dtype=np.float64)
        self.version, self.weights_digest = version, weights_digest
        self.loaded.append(version)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        if self.version is None:
            raise ContractError("no weights yet")
        for request in requests:
            if request.request_id in self._live:
                raise ContractError(f"request {request.request_id} is in flight")
            self._live[request.request_id] = _Live(request)
            self.requests.append(request)

    def step(self) -> list[EngineOutput]:
        if self.version is None:
            return []
        if self._before_step is not None:
            self._before_step()
        finished = []
        for request_id, live in list(self._live.items()):
            self._advance(live)
            ended = live.tokens[-1] in (END_TOKEN, *live.request.sampling.stop_token_ids)
            sampled = len(live.request.prefix_token_ids) + len(live.tokens)
            if ended or sampled >= live.request.sampling.max_tokens:
                del self._live[request_id]
                reason = FinishReason.STOP if ended else FinishReason.LENGTH
                finished.append(_output(live, reason))
        return finished

    def progress(self, since: Mapping[str, int]) -> list[EngineProgress]:
        found = []
        for request_id, known in since.items():
            live = self._live.get(request_id)
            if live is not None and len(live.tokens) > known:
                tokens, logprobs = _arrays(live)
                spans = _spans(live, known)
                found.append(EngineProgress(tokens[known:], logprobs[known:], spans, request_id=request_id))
        return found

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._live.pop(request_id, None)

    def close(self) -> None:
        self.closed = True

    def _advance(self, live: _Live) -> None:
        assert self.version is not None
        request = live.request
        assert max(request.prefix_token_ids, default=0) < VOCABULARY
        position = len(request.prompt_token_ids) + len(request.prefix_token_ids) + len(live.tokens)
        logits = self._bias + np.cos(np.arange(VOCABULARY) + sum(live.request.prompt_token_ids))
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        uniform = (derive_seed("uniform", live.request.seed, position) >> 11) / 2**53
        token = int(np.searchsorted(np.cumsum(probabilities), uniform, side="right"))
        token = min(token, VOCABULARY - 1)
        live.tokens.append(token)
        live.logprobs.append(float(np.log(probabilities[token])))
        live.versions.append(self.version)


def _arrays(live: _Live) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    return np.array(live.tokens, dtype=np.int32), np.array(live.logprobs, dtype=np.float32)


def _spans(live: _Live, start: int = 0) -> tuple[VersionSpan, ...]:
    places = enumerate(live.versions[start:], start)
    return merged(VersionSpan(version, place, place + 1) for place, version in places)


def _output(live: _Live, reason: FinishReason) -> EngineOutput:
    tokens, logprobs = _arrays(live)
    return EngineOutput(tokens, logprobs, _spans(live), reason, request_id=live.request.request_id)
