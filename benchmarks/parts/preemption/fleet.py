"""Preemption fleet: real worker processes with a paced stand-in for the engine, and all that they need.

Everything but the engine, the weights and the training is what production runs: coordinator, journal,
gRPC, worker loop and judge. The stand-in samples no faster than its pace and sleeps between ticks, so
many processes fit on few cores. Its tokens and lengths are functions of the request's seed alone, so
that afterwards every token can be checked, whoever sampled it.

Time is scaled: `scale` scaled seconds pass in one real second.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from antiphon.benchmarks.parts.measure import PROJECT
from antiphon.core.config import RunConfig, build_config
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ContractError
from antiphon.core.records import (
    FinishReason,
    FloatArray,
    IntArray,
    Prompt,
    SnapshotManifest,
)
from antiphon.core.seeds import derive_seed
from antiphon.core.spans import spans_of_changes
from antiphon.environments.environment import Problem
from antiphon.services.rollout.engine.api import EngineOutput, EngineProgress, EngineRequest
from antiphon.services.rollout.weights import WeightSource

MODEL = PROJECT / "examples" / "models" / "chain-sum"
"""Only its tokenizer is used."""
VOCABULARY, END, FIRST = 64, 1, 3
TOKEN_S = 0.5
"""Scaled seconds per token of one completion."""
TICK_TOKENS = 10
"""Tokens that a completion gets at once."""
SPREAD = 0.35
"""Standard deviation of the logarithm of lengths."""
SLOWEST_OF_FOUR = 1.39
"""Mean of the longest of four such lengths, relative to the mean length."""
MAX_TOKENS = 480
HEARTBEAT_S = 5.0
"""Scaled seconds between heartbeats."""
LEASE_S = 60.0
"""Scaled seconds of a lease without a heartbeat."""


@dataclass(frozen=True, slots=True)
class Site:
    """What a whole fleet has in common."""

    workers: int = 8
    groups_at_once: int = 2
    """Groups that one worker samples at the same time."""
    group_size: int = 4
    prompts_per_step: int = 8
    group_s: float = 120.0
    """Mean scaled seconds of a group."""
    scale: float = 60.0
    max_staleness: int = 6
    """A group is two to four learner steps long, and must not be stale by then."""
    handover: bool = True

    @property
    def train_s(self) -> float:
        """Scaled seconds of a learner step: as long as the undisturbed fleet needs for its batch."""
        return self.prompts_per_step * self.group_s / (self.workers * self.groups_at_once)

    def config(self, seed: int) -> RunConfig:
        """Return the run's configuration, its times in real seconds."""
        return build_config(
            {
                "run": {"steps": 100_000, "seed": seed},
                "model": {"path": str(MODEL)},
                "environment": {"train_size": 4096, "heldout_size": 1},
                "evaluation": {"prompts": 1},
                "loop": {
                    "mode": "elastic",
                    "max_staleness": self.max_staleness,
                    "prompts_per_step": self.prompts_per_step,
                    "group_size": self.group_size,
                    "filter": "none",
                },
                "sampling": {"max_tokens": MAX_TOKENS},
                "rollout": {"concurrent_groups": self.groups_at_once, "max_model_tokens": MAX_TOKENS + 32},
                "drafting": {"enabled": False},
                "coordinator": {
                    "lease_s": LEASE_S / self.scale,
                    "heartbeat_s": HEARTBEAT_S / self.scale,
                    "payload_retention_steps": 100_000,
                    "partials_mib": 64 if self.handover else 0,
                },
                "services": {"stall_timeout_s": 60.0},
            }
        )


def length_of(seed: int, group_s: float) -> int:
    """Return how many tokens the completion of a request has."""
    mean = group_s / TOKEN_S / SLOWEST_OF_FOUR
    share = (derive_seed("length", seed) + 0.5) / 2**64
    drawn = mean * np.exp(SPREAD * NormalDist().inv_cdf(share) - SPREAD**2 / 2)
    return int(np.clip(drawn, 1, MAX_TOKENS))


def tokens_of(seed: int, group_s: float) -> IntArray:
    """Return [T] int32 the whole completion of a request."""
    count = length_of(seed, group_s)
    mixed = (np.arange(count, dtype=np.uint64) + np.uint64(seed % 2**31)) * np.uint64(2_654_435_761)
    tokens = (FIRST + (mixed >> np.uint64(16)) % np.uint64(VOCABULARY - FIRST)).astype(np.int32)
    if count < MAX_TOKENS:
        tokens[-1] = END
    return tokens


def logprobs_of(tokens: IntArray) -> FloatArray:
    """Return [T] float32: any function of the tokens will do."""
    return -(tokens.astype(np.float32) + np.float32(1.0)) / np.float32(VOCABULARY)


@dataclass(slots=True)
class _Live:
    request: EngineRequest
    tokens: IntArray
    """What is to be sampled after the prefix."""
    begun: float
    count: int
    spans: list[tuple[int, int]]
    """(version, first token)."""


class PacedEngine:
    """An engine that takes its time and no processor: its owner's thread sleeps in `step`."""

    drafts = False
    continues = True
    vocabulary_size = VOCABULARY

    def __init__(self, group_s: float, token_s: float) -> None:
        """Sample one token of each request in `token_s` real seconds."""
        self.version: int | None = None
        self.weights_digest: str | None = None
        self._group_s, self._token_s = group_s, token_s
        self._live: dict[str, _Live] = {}

    @property
    def unfinished(self) -> int:
        """Number of requests running."""
        return len(self._live)

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        """Take over another version from the next token on."""
        self.version, self.weights_digest = version, weights_digest
        for live in self._live.values():
            if live.spans[-1][1] == live.count:
                live.spans.pop()
            live.spans.append((version, live.count))

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Begin requests."""
        if self.version is None:
            raise ContractError("the engine holds no snapshot yet; load_weights must come before add")
        for request in requests:
            given = len(request.prefix_token_ids)
            tokens = tokens_of(request.seed, self._group_s)[given:]
            self._live[request.request_id] = _Live(
                request, tokens, time.perf_counter(), 0, [(self.version, 0)]
            )

    def step(self) -> list[EngineOutput]:
        """Sleep for a tick, then hand out what is finished."""
        time.sleep(TICK_TOKENS * self._token_s)
        now, finished = time.perf_counter(), []
        for request_id, live in list(self._live.items()):
            live.count = min(len(live.tokens), int((now - live.begun) / self._token_s))
            if live.count == len(live.tokens):
                del self._live[request_id]
                reason = FinishReason.STOP if live.tokens[-1] == END else FinishReason.LENGTH
                finished.append(
                    EngineOutput(
                        live.tokens,
                        logprobs_of(live.tokens),
                        spans_of_changes(live.spans, 0, live.count),
                        reason,
                        request_id=request_id,
                    )
                )
        return finished

    def progress(self, since: Mapping[str, int]) -> list[EngineProgress]:
        """Tell what requests have beyond the tokens known."""
        return [
            EngineProgress(
                live.tokens[known : live.count],
                logprobs_of(live.tokens[known : live.count]),
                spans_of_changes(live.spans, known, live.count),
                request_id=request_id,
            )
            for request_id, known in since.items()
            if (live := self._live.get(request_id)) is not None and live.count > known
        ]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests."""
        for request_id in request_ids:
            self._live.pop(request_id, None)

    def close(self) -> None:
        """Nothing is held."""


class NoWeights(WeightSource):
    """Snapshots without a byte."""

    async def fetch(self, manifest: SnapshotManifest) -> None:
        """Bring nothing."""
        await asyncio.sleep(0)

    def rebuild(self, manifest: SnapshotManifest) -> Mapping[str, Any]:
        """Return no tensors."""
        return {}

    def prune(self, kept: Sequence[SnapshotManifest]) -> None:
        """Forget nothing."""


def manifest_of(run_id: str, version: int) -> SnapshotManifest:
    """Return the manifest of a snapshot without bytes."""
    digest = digest_bytes(f"preemption-{version}".encode())
    return SnapshotManifest(run_id, version, digest, (), (), 0, "127.0.0.1:1")


class NumberedPrompts:
    """Prompts of two tokens."""

    def prompt(self, split: str, index: int) -> Prompt:
        """Return prompt `index`."""
        return Prompt(f"{split}-0-{index}", (FIRST + index % 50, FIRST))


class LengthReward:
    """An environment whose rewards are cheap to compute and vary within a group."""

    name = "benchmark/length"

    def problem(self, split: str, index: int) -> Problem:
        """Return problem `index`."""
        return Problem(key=f"{split}-0-{index}", text="", answer="")

    def size(self, split: str) -> int:
        """Return how many there are."""
        return 1 << 20

    def problem_by_key(self, key: str) -> Problem:
        """Find a problem again."""
        return Problem(key=key, text="", answer="")

    def judge(self, problem: Problem, completions: Sequence[str]) -> list[float]:
        """Score a text by the parity of its length."""
        return [float(len(text) % 2) for text in completions]


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What one worker process is told."""

    address: str
    name: str
    token_s: float
    """Real seconds per token."""
    group_s: float
    start_at: float
    """On the machine's monotonic clock: when it may register."""


def spawn(order: WorkerOrder, log: Path) -> "subprocess.Popen[bytes]":
    """Start a worker process; it imports at once and registers when its time has come."""
    with log.open("ab") as out:
        return subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "antiphon.benchmarks.parts.preemption.worker",
                json.dumps(asdict(order)),
            ],
            cwd=PROJECT,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
