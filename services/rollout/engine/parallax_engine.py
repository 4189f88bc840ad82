"""ParallaxEngine: the nodes of a Parallax network behind the Engine protocol. Untested on the real thing.

What is spoken is what Parallax's repository of 1 July 2026 serves: text in and out at `/v1/chat/completions`,
without log-probabilities and seeds, and weights at `/weight/refit`, as safetensors blocks that each node
takes from a Lattica network by their content ids.

Nodes swap one by one, and an answer names no version. So a swap hangs up on all requests, and nothing is
sampled until `/weight/refit/timestamp`, the oldest swap among the nodes, says that each has taken the
weights; then the requests begin again.

A prompt must be what its text is tokenized to, or the request is refused. A completion's tokens are those of
its text; where they are not as many as the server counted, other tokens were sampled, and the request begins
again. Greedy ones, which would come back the same, are not trained on and stay as they are.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save

from antiphon.api.engine import EngineAbilities, EngineRequest
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.records import FinishReason
from antiphon.models.codec import TextCodec
from antiphon.services.rollout.engine.environment import ServerSettings
from antiphon.services.rollout.engine.server_engine import Live, ServerEngine
from antiphon.system.clock import wall_clock
from antiphon.weights.snapshot import VerifiedWeights
from antiphon.weights.transports.lattica import FOLDER, content_id

CHAT, REFIT, TIMESTAMP = "/v1/chat/completions", "/weight/refit", "/weight/refit/timestamp"
POLL_S = 0.25
"""Between two looks at whether all nodes have swapped; they hear of it every 10 s."""
SWAP_SHARE = 0.9
"""Of the time for a swap: at the end of all of it the worker would end."""
TRIES = 8
"""Of a request whose text has other tokens than were sampled."""
TEMPLATE = "{{ messages[0]['content'] }}"
"""Chat template that passes the one message through unchanged."""
CHECKED = " \n1 + 2{} = x \n"
"""A prompt, with an end token in it, that a template would change if it trimmed or framed it."""
NEUTRAL = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""Said, since a server may take others from generation_config.json."""


class BlockPeer(Protocol):
    """Serves blocks to a Lattica network, as `LatticaNode` does; any thread may call it."""

    def put(self, data: bytes) -> str:
        """Hold a block and return its content id."""

    def remove(self, address: str) -> None:
        """Hold a block no more."""

    def close(self) -> None:
        """Leave the network."""


@dataclass(slots=True)
class _Live(Live):
    """One request in flight, and what of its text has come."""

    known: Sequence[int] = ()
    """Tokens of the prompt."""
    prompt: str = ""
    text: str = ""
    ended: FinishReason | None = None
    """How the server says that the text ended."""
    tries: int = 0


class ParallaxEngine(ServerEngine[_Live]):
    """The engine of one worker, in the nodes of a Parallax network."""

    continues = False
    abilities = EngineAbilities(*[False] * 9)
    path = CHAT
    speaks = "Parallax of July 2026"
    full = (429,)

    def __init__(self, settings: ServerSettings, join: Callable[[Path], BlockPeer]) -> None:
        """Ask the server what it is, see `ServerEngine`.

        Args:
            settings: where it is.
            join: joins the nodes' Lattica network with a folder for blocks, once the server was asked; the
                peer is closed with the engine.
        """
        self._join = join
        self._peer: BlockPeer | None = None
        self._held: set[str] = set()
        self._stamp = 0
        self._codec = TextCodec.load(str(settings.model_dir))
        super().__init__(settings)

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()
        super().close()

    async def _introduce(self) -> None:
        limit_s = self.settings.silent_s
        text = CHECKED.format(self._decode([self._codec.end_token_id]))
        asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0.0}
        try:
            await self._swapped(limit_s)
            counted = (await self._ask("POST", CHAT, limit_s, asked))["usage"]["prompt_tokens"]
        except IntegrityError as error:
            raise ConfigError(
                f"{error}; start Parallax's scheduler at rollout.engine_url with --enable-weight-refit True, "
                "and its nodes"
            ) from error
        if counted != (wanted := len(self._encode(text))):
            raise ConfigError(
                f"{self._server} made {counted} tokens of a prompt that has {wanted}; start it on a copy of "
                f"model.path whose chat template is {TEMPLATE}, so that prompts pass through unchanged"
            )
        self._peer = await asyncio.to_thread(self._join, self._folder / FOLDER)

    def _encode(self, text: str) -> list[int]:
        return list(self._codec.encode(text, add_special_tokens=False))

    def _decode(self, tokens: list[int]) -> str:
        return str(self._codec.tokenizer.decode(tokens, skip_special_tokens=False))

    async def _swapped(self, limit_s: float) -> float:
        """Return the time stamp of the oldest swap among the nodes."""
        said = await self._ask("GET", TIMESTAMP, limit_s)
        with self._understood("says no time of a swap as"):
            return float(said["latest_timestamp"])

    async def _swap(self, version: int, weights: VerifiedWeights) -> None:
        assert self._peer is not None, "it was joined at the start"
        limit_s, peer = self.settings.swap_s * SWAP_SHARE, self._peer
        await self._hang_up()
        for live in self._live.values():
            live.tries = 0
        try:
            async with asyncio.timeout(limit_s):
                index = await asyncio.to_thread(self._offer, peer, weights)
                # Whole seconds, never one again: a node names a folder by them, and passes over one it has.
                self._stamp = max(int(wall_clock()), int(await self._swapped(limit_s)) + 1, self._stamp + 1)
                blocks = sorted(set(index.values()))
                order = {"time_stamp": self._stamp, "cid": blocks, "index_map": index, "version": version}
                await self._ask("POST", REFIT, limit_s, order)
                while (oldest := await self._swapped(limit_s)) < self._stamp:
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise IntegrityError(
                f"not all nodes behind rollout.engine_url={self.settings.url} took version {version} within "
                f"{limit_s:g} s; look at their logs, or raise services.stall_timeout_s"
            ) from None
        if oldest > self._stamp:
            raise IntegrityError(
                f"somebody else swaps the weights behind rollout.engine_url={self.settings.url}; give each "
                "worker a network of its own"
            )
        for old in self._held - set(blocks):  # a node that joins later wants those of this version
            await asyncio.to_thread(peer.remove, old)
        self._held &= set(blocks)

    def _offer(self, peer: BlockPeer, weights: VerifiedWeights) -> dict[str, str]:
        """Hold weights as blocks, and return tensor name -> content id of its block."""
        index: dict[str, str] = {}
        for names, data in blocks_of(weights):
            address = peer.put(data)
            self._held.add(address)
            if address != content_id(data):  # nodes would ask for it again and again
                raise IntegrityError(
                    f"the Lattica peer calls a block {address}, and Parallax {content_id(data)}; install the "
                    "release of lattica that Parallax's nodes have"
                )
            index |= dict.fromkeys(names, address)
        return index

    def _accept(self, request: EngineRequest, version: int) -> _Live:
        if request.sampling.stop or request.sampling.stop_token_ids:
            raise ConfigError(
                f"request {request.request_id} is to end at texts or tokens of its own, which rollout.engine="
                "parallax cannot say; use rollout.engine=vllm or http"
            )
        known = [*request.prompt_token_ids, *request.prefix_token_ids]
        prompt = self._decode(known)
        if self._encode(prompt) != known:
            raise ConfigError(
                f"the prompt of request {request.request_id} has other tokens than its text, which is all "
                "that rollout.engine=parallax takes; use rollout.engine=vllm or http"
            )
        return _Live(request, [(version, 0)], known=known, prompt=prompt)

    def _body(self, live: _Live) -> Mapping[str, Any]:
        sampling = live.request.sampling
        live.text, live.ended = "", None
        live.tries += 1
        return {  # which model is meant the scheduler says
            "messages": [{"role": "user", "content": live.prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": live.most,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            **NEUTRAL,
        }

    def _take(self, live: _Live, chunk: Mapping[str, Any]) -> bool:
        name = live.request.request_id
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning") or delta.get("reasoning_content") or delta.get("tool_calls"):
                raise self._failed(
                    f"took parts out of the text of request {name}; start it without parsers for reasoning "
                    "and tool calls"
                )
            live.text += delta.get("content") or ""
            live.ended = self._reason(live, choice.get("finish_reason")) or live.ended
        if not (usage := chunk.get("usage")) or live.ended is None:
            return False
        if usage["prompt_tokens"] != len(live.known):
            raise self._failed(
                f"made {usage['prompt_tokens']} tokens of the prompt of request {name}, which has "
                f"{len(live.known)}; its chat template must be {TEMPLATE}"
            )
        if (sampled := usage["completion_tokens"]) > live.most:
            raise IntegrityError(
                f"request {name} got {sampled} tokens, but at most {live.most} were asked for"
            )
        self._settle(live, sampled)
        return True

    def _settle(self, live: _Live, sampled: int) -> None:
        """Take the tokens of a text, or begin again when it was made of others."""
        stopped, sampling = live.ended is FinishReason.STOP, live.request.sampling
        text, known = live.prompt + live.text, list(live.known)
        whole = self._encode(text)
        apart = self._encode(live.text)  # where the first token would grow into the prompt's last
        kinds = [apart] if whole[: len(known)] != known else [whole[len(known) :], apart]
        fits = [
            one for one in kinds if len(one) + stopped == sampled and self._decode([*known, *one]) == text
        ]
        if not fits and sampling.temperature > 0.0:
            if live.tries < TRIES:
                self._begin(live)
                return
            raise IntegrityError(
                f"request {live.request.request_id} came back {TRIES} times as a text of other tokens than "
                "were sampled; use an engine that gives ids: rollout.engine=vllm or http"
            )
        tokens = [*(fits or kinds)[0], *[self._codec.end_token_id] * stopped]
        live.tokens = tokens[: live.most]
        live.logprobs = [0.0] * len(live.tokens)
        live.reason = live.ended


def blocks_of(weights: Mapping[str, Any]) -> Iterator[tuple[list[str], bytes]]:
    """Yield names of tensors and the safetensors file that holds them: a layer's together, others alone.

    A node takes the blocks of its own layers. Tensors stay whole: the node's own joining of parts gives those
    of one tensor the name of the next (`concat_weight_partition`).
    """
    groups: dict[str, list[str]] = {}
    for name in weights:
        layer = re.search(r"layers\.\d+\.", name)
        groups.setdefault(layer[0] if layer else name, []).append(name)
    for names in groups.values():
        yield names, save({name: weights[name].contiguous() for name in names})
