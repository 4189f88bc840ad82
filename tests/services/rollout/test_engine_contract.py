"""The contract of engines: an engine that declares what it cannot is found out, by that ability alone."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from antiphon.api.engine import EngineAbilities, EngineOutput, EngineProgress, EngineRequest
from antiphon.benchmarks.engine_contract import MODEL
from antiphon.benchmarks.parts.contract import CHECKS, Subject, Version, examine, versions_of
from antiphon.benchmarks.parts.examine_engine import start
from antiphon.core.records import VersionSpan
from antiphon.services.rollout.engine.vllm_engine import VllmEngine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: take the cpu or cuda variant"
    ),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    engine = start("vllm", MODEL, "")
    assert isinstance(engine, VllmEngine)
    yield engine
    engine.close()
    gc.collect()


@pytest.fixture(scope="module")
def versions() -> tuple[Version, ...]:
    return versions_of(MODEL)


class Lying:
    """An engine that declares everything and breaks one promise."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def abilities(self) -> EngineAbilities:
        return EngineAbilities()

    @property
    def version(self) -> int | None:
        return self._engine.version

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        self._engine.load_weights(version, tensors, weights_digest)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self._engine.add(requests)

    def step(self) -> list[EngineOutput]:
        return self._engine.step()

    def progress(self, since: Mapping[str, int]) -> list[EngineProgress]:
        return self._engine.progress(since)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort(request_ids)


class Deaf(Lying):
    """Takes other tokens than it is given."""

    def add(self, requests: Sequence[EngineRequest]) -> None:
        super().add(
            [
                replace(one, prefix_token_ids=tuple((token + 1) % 64 for token in one.prefix_token_ids))
                for one in requests
            ]
        )


class Imprecise(Lying):
    """Is a hundredth of a nat off."""

    def step(self) -> list[EngineOutput]:
        return [replace(one, logprobs=one.logprobs - np.float32(0.01)) for one in super().step()]


class Random(Lying):
    """Draws with seeds of its own."""

    drawn = 0

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self.drawn += 1
        super().add([replace(one, seed=(one.seed + self.drawn) % 2**64) for one in requests])


class Renewing(Lying):
    """Draws what follows a prefix with another seed, as vLLM's own sampler does."""

    def add(self, requests: Sequence[EngineRequest]) -> None:
        super().add([replace(one, seed=one.seed ^ len(one.prefix_token_ids)) for one in requests])


class Forgetful(Lying):
    """Says that the newest version sampled all."""

    def step(self) -> list[EngineOutput]:
        assert self.version is not None
        return [
            replace(one, spans=(VersionSpan(self.version, 0, one.token_ids.size),)) for one in super().step()
        ]


class Restarting(Lying):
    """Begins again at a swap."""

    def __init__(self, engine: VllmEngine) -> None:
        super().__init__(engine)
        self._running: dict[str, EngineRequest] = {}

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self._running |= {one.request_id: one for one in requests}
        super().add(requests)

    def step(self) -> list[EngineOutput]:
        outputs = super().step()
        for one in outputs:
            self._running.pop(one.request_id, None)
        return outputs

    def abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            self._running.pop(name, None)
        super().abort(request_ids)

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        running = list(self._running.values())
        self._engine.abort([one.request_id for one in running])
        super().load_weights(version, tensors, weights_digest)
        self._engine.add([replace(one, seed=one.seed ^ 1) for one in running])


class Boasting(Lying):
    """Tells of tokens that it has not sampled."""

    def progress(self, since: Mapping[str, int]) -> list[EngineProgress]:
        return [replace(one, token_ids=(one.token_ids + 1) % 64) for one in super().progress(since)]


class Plain(Lying):
    """Makes no use of history."""

    def step(self) -> list[EngineOutput]:
        return [replace(one, drafting=None) for one in super().step()]


class Endless(Lying):
    """Overlooks texts that end a turn."""

    def add(self, requests: Sequence[EngineRequest]) -> None:
        super().add([replace(one, sampling=replace(one.sampling, stop=())) for one in requests])


class Hoarding(Lying):
    """Takes weights whatever their digest is."""

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        super().load_weights(version, tensors, tensors.digest)  # type: ignore[attr-defined]


LIES: dict[Callable[[VllmEngine], Any], set[str]] = {
    Hoarding: {"engine"},
    Deaf: {"ids", "keyed"},
    Imprecise: {"logprobs", "spans"},
    Random: {"seeds", "keyed", "drafts"},
    Renewing: {"keyed"},
    Forgetful: {"spans"},
    Restarting: {"spans", "swaps"},
    Boasting: {"progress", "swaps"},
    Plain: {"drafts"},
    Endless: {"stops"},
}
"""What is found of each; where one promise rests on another, both."""


def test_our_engine_keeps_what_it_declares(engine: VllmEngine, versions: tuple[Version, ...]) -> None:
    found = examine(Subject(engine, MODEL, versions))
    assert found == {"declared": list(CHECKS), "passed": list(CHECKS), "failed": {}}


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_what_an_engine_declares_and_cannot_is_found(
    lie: Callable[[VllmEngine], Any], engine: VllmEngine, versions: tuple[Version, ...]
) -> None:
    found = examine(Subject(lie(engine), MODEL, versions))
    assert set(found["failed"]) == LIES[lie], found["failed"]


def test_every_ability_is_lied_about() -> None:
    assert set().union(*LIES.values()) == set(CHECKS)
