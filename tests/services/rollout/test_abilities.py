"""What an engine lacks is said or refused at a worker's start, and its requests meet no swap."""

import asyncio
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from antiphon.api.engine import ALL_ABILITIES, EngineAbilities, EngineOutput, EngineRequest
from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import ConfigError
from antiphon.core.records import SamplingParameters
from antiphon.services.rollout.abilities import COSTS, check_abilities
from antiphon.services.rollout.engine.thread import EngineThread
from tests.support.light_engine import LightEngine

PAGE = Path(__file__).resolve().parents[3] / "docs" / "concepts" / "engines.md"
HTTP = {
    "rollout": {"engine": "http", "engine_url": "http://127.0.0.1:8000"},
    "sampling": {"sampler": "native"},
}

PARALLAX = {
    "rollout": {
        "engine": "parallax",
        "engine_url": "http://127.0.0.1:3001",
        "engine_peer": "/ip4/127.0.0.1/tcp/4001/p2p/12D3Koo",
        "logprobs": "learner",
    },
    "sampling": {"sampler": "native"},
    "loop": {"max_staleness": 0},
    "trust": {"audits": "off"},
}


def lacking(*names: str) -> EngineAbilities:
    return replace(ALL_ABILITIES, **dict.fromkeys(names, False))


def config(**sections: dict[str, object]) -> RunConfig:
    return build_config({"model": {"path": "m"}, **sections})


def test_the_page_and_the_costs_name_every_ability() -> None:
    names = [one.name for one in fields(EngineAbilities)]
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), flags=re.MULTILINE)
    assert listed == names == list(COSTS)
    assert not ALL_ABILITIES.missing and lacking("seeds", "spans").missing == ("seeds", "spans")


@pytest.mark.parametrize("lacks", ["seeds", "keyed"])
def test_fixed_mode_needs_seeds_and_keys(lacks: str) -> None:
    fixed = config(loop={"mode": "fixed", "max_staleness": 0})
    with pytest.raises(ConfigError, match=rf"no {lacks}, so that a run in loop.mode=fixed would not repeat"):
        check_abilities(lacking(lacks), fixed)
    assert check_abilities(lacking(lacks), config()) == (f"the engine has no {lacks}: {COSTS[lacks]}",)


def test_a_run_without_log_probabilities_says_so() -> None:
    with pytest.raises(ConfigError, match=r"set rollout\.logprobs=learner and trust\.audits=off"):
        check_abilities(lacking("logprobs"), config())
    for bound in (0, 2):
        loop = {"max_staleness": bound}
        told = config(rollout={"logprobs": "learner"}, loop=loop, trust={"audits": "off"})
        assert len(check_abilities(lacking("logprobs"), told)) == 1
        assert told.scores_earlier is (bound > 0)
    assert not config().scores_earlier


def test_texts_that_end_turns_need_an_engine_that_sees_them() -> None:
    assert len(check_abilities(lacking("stops"), config())) == 1
    with pytest.raises(ConfigError, match=r"cannot end a turn at sampling.stop=\['done'\]"):
        check_abilities(lacking("stops"), config(sampling={"stop": ["done"]}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rollout": {"engine_url": "http://a:1"}},
            "rollout.engine_url has no effect with rollout.engine=vllm",
        ),
        (
            {"rollout": {"engine": "http"}, "sampling": HTTP["sampling"]},
            "rollout.engine_url='' names no server",
        ),
        (HTTP | {"rollout": {"engine": "http", "engine_url": "http://u:p@h:1"}}, "names no server"),
        ({"rollout": HTTP["rollout"]}, "set sampling.sampler=native"),
        (HTTP | {"rollout": HTTP["rollout"] | {"workers": 2}}, "rollout.workers=2 workers would swap"),
        (HTTP | {"rollout": HTTP["rollout"] | {"swap_cache": "keep"}}, "rollout.swap_cache=keep cannot act"),
        (
            HTTP | {"rollout": HTTP["rollout"] | {"engine_peer": "/ip4/a/tcp/1/p2p/b"}},
            "rollout.engine_peer has no effect with rollout.engine=http",
        ),
        (
            PARALLAX | {"rollout": PARALLAX["rollout"] | {"engine_peer": "127.0.0.1:1"}},
            "write /ip4/ADDRESS/tcp/PORT/p2p/ID of Parallax's scheduler",
        ),
        (
            PARALLAX | {"rollout": PARALLAX["rollout"] | {"logprobs": "engine"}},
            "rollout.engine=parallax gives no log-probabilities; set rollout.logprobs=learner",
        ),
        (PARALLAX | {"sampling": {}}, "rollout.engine=parallax draws by the server's own sampler"),
        (
            PARALLAX | {"rollout": PARALLAX["rollout"] | {"workers": 2}},
            "rollout.workers=2 workers would swap",
        ),
        ({"rollout": {"logprobs": "learner"}}, "trust.audits=remote compares log-probabilities"),
        (
            {"rollout": {"logprobs": "learner", "swap_cache": "keep"}, "loop": {"mode": "elastic"}},
            "rollout.swap_cache=keep has tokens sampled over caches of older weights",
        ),
        (
            {"rollout": {"logprobs": "learner"}, "learner": {"ranks": 2}},
            "loop.max_staleness=2 and learner.ranks=2; set the former to 0 or the latter to 1",
        ),
        (
            {
                "rollout": {"logprobs": "learner"},
                "loop": {"max_staleness": 0},
                "trust": {"audits": "off"},
                "reference": {"model": "m", "kl": 0.1, "kl_place": "reward"},
            },
            "so that reference.kl has none to compare",
        ),
    ],
)
def test_configurations_that_cannot_work_are_refused(
    changes: dict[str, dict[str, object]], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        config(**changes)


def test_an_engine_elsewhere_is_configured() -> None:
    assert config(**HTTP).rollout.engine == "http"
    assert config(**PARALLAX).rollout.engine == "parallax"


class Uneven(LightEngine):
    """A light engine that runs until it is told to end, and notes what it is asked."""

    def __init__(self, abilities: EngineAbilities) -> None:
        super().__init__()
        self.abilities = abilities
        self.asked: list[str] = []

    def add(self, requests: Iterable[EngineRequest]) -> None:
        requests = list(requests)
        self.asked += [f"add {one.request_id}" for one in requests]
        super().add(requests)

    def abort(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        self.asked += [f"abort {name}" for name in request_ids]
        super().abort(request_ids)


def bias(end: float) -> dict[str, np.ndarray]:
    """Return weights under which token 0, which ends a completion, is this much likelier than others."""
    return {"bias": np.array([end] + [0.0] * 15)}


@pytest.mark.parametrize("lacks", [(), ("spans",), ("swaps",)])
def test_requests_that_outlive_no_swap_begin_again(lacks: tuple[str, ...]) -> None:
    engine, outputs = Uneven(lacking(*lacks)), list[EngineOutput]()

    async def body() -> None:
        thread = EngineThread(lambda: engine, outputs.extend)
        running = asyncio.create_task(thread.run())
        try:
            await thread.started(10.0)
            await thread.load(0, bias(-1e9), "0", 10.0)
            thread.add([EngineRequest("r", (5,), 1, SamplingParameters(max_tokens=1_000_000))])
            # Unless it outlives a swap, nobody may keep what it has until then.
            progress = await thread.progress({"r": 0}, 10.0)
            while not lacks and not progress:
                progress = await thread.progress({"r": 0}, 10.0)
            assert bool(progress) is (not lacks)
            await thread.load(1, bias(1e9), "1", 10.0)
            async with asyncio.timeout(10.0):
                while not outputs:
                    await asyncio.sleep(0)
        finally:
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(body())
    versions = {span.version for span in outputs[0].spans}
    assert versions == ({1} if lacks else {0, 1})
    assert engine.asked == (["add r", "abort r", "add r"] if lacks else ["add r"])
