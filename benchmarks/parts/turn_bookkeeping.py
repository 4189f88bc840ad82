"""Turn bookkeeping: the production loop with random tokens, and a second account of every token.

The engine notes what it was given and what it sampled, the environment says random words. What trains must be
the first account, token by token, and no request may hold other tokens than those before it.
"""

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from antiphon.api.engine import EngineOutput, EngineRequest
from antiphon.benchmarks.parts.imposed_worker import ImposedWeights, WorkerOrder
from antiphon.benchmarks.parts.served_run import served_run
from antiphon.core.config import RunConfig, build_config
from antiphon.core.messages import Ended, Message, Reply
from antiphon.core.records import BatchRow, FinishReason
from antiphon.core.seeds import generator
from antiphon.core.spans import sampled_mask, token_versions
from antiphon.environments.conversation import ConversationEnvironment, user
from antiphon.environments.environment import Problem
from antiphon.environments.generated import GeneratedConversations
from antiphon.environments.scoring.conversations import InProcessConversations
from antiphon.lineage.rollout_table import decode_batch
from antiphon.models.rendering import Renderer
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.prompts import prompts_of
from antiphon.services.reward.turns import TurnAnswerer
from antiphon.services.rollout.worker import RolloutWorker
from antiphon.simulator.standins import arithmetic
from antiphon.simulator.standins.engines import ArithmeticEngine

MARKERS = {
    "qwen3": ("<|im_end|>", "<|endoftext|>", "<|im_start|>"),
    "llama-3": (
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    ),
    "kimi-k2": (
        *("<|im_end|>", "[EOS]", "<|im_assistant|>", "<|im_middle|>", "<|im_system|>", "<|im_user|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
}
"""Renderer -> the special tokens of its family; the first ones end a turn."""
ENDS = {"qwen3": 2, "llama-3": 3, "kimi-k2": 1}
TOOL_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
END_SHARE = 8
"""One token in so many ends a turn."""


def write_model(folder: Path, renderer: str) -> None:
    """Write a model's folder without weights: a token for each byte, and the markers of a family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: place for place, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKERS[renderer]))
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in TOOL_MARKERS])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(token) for token in MARKERS[renderer][: ENDS[renderer]]]
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": MARKERS[renderer][0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    config = {"model_type": "qwen3", "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(config))


class Chatter(GeneratedConversations):
    """Says random words until it has enough."""

    only_compares = True

    def draw(self, random: np.random.Generator) -> tuple[str, str]:
        return " ".join(map(str, random.integers(0, 10**6, 3))), ""

    def conversation(self) -> "_Chatting":
        return _Chatting()


class _Chatting:
    def begin(self, problem: Problem, seed: int) -> Sequence[Message]:
        self._random = generator("chatter", seed)
        return [user(problem.text)]

    def answer(self, reply: Reply) -> Sequence[Message] | Ended:
        said = self._random.integers(32, 127, int(self._random.integers(1, 20))).tolist()
        if said[0] % 8 == 0:
            return Ended(float(said[-1] % 2))
        return [user(bytes(said).decode())]


@dataclass(slots=True)
class Account:
    """What an engine was given and what it sampled of each sample, request by request."""

    requests: dict[str, list[tuple[EngineRequest, EngineOutput]]] = field(default_factory=dict)
    rendered_twice: int = 0
    """Tokens of a request that are others than those before it."""
    turns: int = 0

    def note(self, request: EngineRequest, output: EngineOutput) -> None:
        """Note one turn."""
        before = self.requests.setdefault(request.request_id, [])
        if before:
            old, sampled = before[-1]
            known = [*old.prompt_token_ids, *old.prefix_token_ids, *sampled.token_ids.tolist()]
            now = [*request.prompt_token_ids, *request.prefix_token_ids][: len(known)]
            now += [-1] * (len(known) - len(now))
            self.rendered_twice += sum(a != b for a, b in zip(known, now, strict=True))
        before.append((request, output))
        self.turns += 1


class RandomEngine(ArithmeticEngine):
    """Samples any token of a vocabulary, and ends a turn now and then."""

    def __init__(self, vocabulary: int, end: int, account: Account) -> None:
        super().__init__()
        self.vocabulary_size, self._end, self._account = vocabulary, end, account

    def load_weights(self, version: int, tensors: Any, weights_digest: str) -> None:
        """Serve from the next `step` on: the digest of whatever weights they are is the policy."""
        super().load_weights(version, {"weights": weights_digest}, weights_digest)

    def step(self) -> list[EngineOutput]:
        finished = []
        for request_id, live in list(self._live.items()):
            request, at = live.request, len(live.request.prefix_token_ids) + len(live.tokens)
            drawn = arithmetic.mix(self._weights, live.prompt, request.seed, at)
            token = self._end if drawn % END_SHARE == 0 else (drawn >> 8) % self.vocabulary_size
            ends = token in self.ends or at + 1 >= request.sampling.max_tokens
            live.tokens.append(token)
            live.logprobs.append(-((drawn >> 40) % 4096 + 1) / 1024.0)
            if ends:
                del self._live[request_id]
                reason = FinishReason.STOP if token in self.ends else FinishReason.LENGTH
                output = EngineOutput(*live.sampled(0), reason, request_id=request_id)
                self._account.note(request, output)
                finished.append(output)
        return finished

    ends: frozenset[int] = frozenset()
    """All tokens that end a turn."""


def config_of(model: Path, renderer: str, steps: int) -> RunConfig:
    """Return the configuration of a run."""
    arguments = {"thinking_retention": "all"} if renderer == "qwen3" else {}
    return build_config(
        {
            "run": {"name": f"turns-{renderer}", "steps": steps},
            "model": {"path": str(model), "renderer": renderer, "template_arguments": arguments},
            "environment": {
                "name": "antiphon.benchmarks.parts.turn_bookkeeping:Chatter",
                "train_size": 256,
                "heldout_size": 4,
                "max_turns": 12,
            },
            "loop": {"prompts_per_step": 16, "group_size": 8, "filter": "none"},
            "sampling": {"max_tokens": 24},
            "rollout": {"concurrent_groups": 8, "max_model_tokens": 1024},
            "evaluation": {"prompts": 1},
            "drafting": {"enabled": False},
        }
    )


async def bookkeep(folder: Path, renderer: str, steps: int) -> tuple[Account, int, int]:
    """Run the loop; return the account, and how many rows trained and how many of them differ from it."""
    write_model(folder / "model", renderer)
    config = config_of(folder / "model", renderer, steps)
    made = Chatter({}, 0, config.environment.train_size, config.environment.heldout_size)
    environment = cast(ConversationEnvironment, made)
    rendering = Renderer.load(config, turns=True)
    account, codec = Account(), rendering.codec
    engine = RandomEngine(codec.vocabulary_size, codec.end_token_id, account)
    engine.ends = frozenset(codec.end_tokens)
    order, resumed = WorkerOrder("worker", 0.0), threading.Event()
    async with InProcessConversations(environment) as conversations:
        prompts = prompts_of(config, environment, rendering)
        answer = TurnAnswerer(conversations, rendering, config.environment.seed)
        async with served_run(config, folder / "run", 0.0, prompts=prompts, answer=answer) as run:
            client = CoordinatorClient(run.address)
            worker = RolloutWorker(
                client, "worker", "", lambda config: engine, lambda config: ImposedWeights(order, resumed)
            )
            working = asyncio.ensure_future(worker.run(lambda: None))
            try:
                await run.flow.run()
                await asyncio.wait([working], timeout=60.0)
            finally:
                working.cancel()
                await asyncio.wait([working], timeout=10.0)
                await client.close()
            state = run.machine.state
            sealed = [decode_batch(run.machine.store.get(batch.digest)) for batch in state.sealed]
            leases = {e["group_id"]: e["lease_id"] for e in await _submitted(run)}
    rows = [row for batch in sealed for row in batch]
    different = sum(
        not _agrees(row, account.requests[f"{leases[row.group_id]}/{row.sample_index}"]) for row in rows
    )
    return account, len(rows), different


async def _submitted(run: Any) -> list[dict[str, Any]]:
    return [json.loads(event.body) for event in await run.events() if event.kind == "group.submitted"]


def _agrees(row: BatchRow, turns: Sequence[tuple[EngineRequest, EngineOutput]]) -> bool:
    """Return whether a row is what the engine was given and sampled: tokens, mask, versions, logprobs."""
    request, output = turns[-1]
    tokens = [*request.prefix_token_ids, *output.token_ids.tolist()]
    mask, versions = np.zeros(len(tokens), dtype=bool), np.full(len(tokens), -1)
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    for asked, said in turns:
        start = len(asked.prefix_token_ids)
        mask[start : start + said.token_ids.size] = True
        logprobs[start : start + said.token_ids.size] = said.logprobs
        versions[start : start + said.token_ids.size] = token_versions(said)
    return (
        row.token_ids.tolist() == tokens
        and row.prompt_token_ids.tolist() == list(request.prompt_token_ids)
        and np.array_equal(sampled_mask(row), mask)
        and np.array_equal(token_versions(row), versions)
        and np.array_equal(row.logprobs, logprobs)
    )
