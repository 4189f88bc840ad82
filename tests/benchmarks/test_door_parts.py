"""What the benchmark of the door stands on: its task, its network, its lists of packages and its verdicts."""

import asyncio
import json
import re
import urllib.request
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.benchmarks import door
from antiphon.benchmarks.parts.door.arithmetic_task import EXAMPLE, Arithmetic
from antiphon.benchmarks.parts.door.between import between
from antiphon.benchmarks.parts.door.environments import COOKBOOKS, EXAMPLES
from antiphon.benchmarks.parts.door.recipes import compare
from antiphon.benchmarks.parts.door.served import CONFIG
from antiphon.core.client_records import CLIENT
from antiphon.core.config import load_config
from antiphon.core.messages import Ended, Reply


@given(st.integers(0, 2**32), st.sampled_from(["{}", "It is {}.", "1,{}", "9 {}"]))
@settings(max_examples=50)
def test_the_task_is_that_of_the_recipe(seed: int, form: str) -> None:
    task = Arithmetic({}, seed, 4, 1)
    problem = task.problem("train", 3)
    a, b = map(int, re.findall(r"\d+", problem.text))
    assert problem.text == f"What is {a} + {b}?" and 0 <= min(a, b) <= max(a, b) <= 100
    for answer, right in ((a + b, form != "1,{}"), (a + b + 1, False)):
        asked = task.conversation()
        said = asked.begin(problem, 0)
        assert [one.content for one in said] == [*EXAMPLE, problem.text]
        assert asked.answer(Reply(form.format(answer))) == Ended(float(right))


def test_the_configuration_is_a_clients() -> None:
    config = load_config(CONFIG, [])
    assert config.environment.name == CLIENT and config.door.base_models


@pytest.mark.parametrize("cookbook", COOKBOOKS)
def test_the_packages_of_a_client_are_pinned(cookbook: str) -> None:
    lines = (EXAMPLES / f"cookbook-{cookbook}.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pins["tinker-cookbook"] == cookbook and pins["tinker"] == "0.38.0"
    assert pins["torch"].endswith("+cpu") and not any(name.startswith("nvidia") for name in pins)


def test_what_stands_between_sends_twice_and_answers_with_the_second_answer() -> None:
    seen = Counter[str]()

    async def handle(request: web.Request) -> web.Response:
        body = await request.text()
        seen[body] += 1
        return web.json_response({"times": seen[body]})

    async def run() -> list[int]:
        application = web.Application()
        application.router.add_post("/api/v1/{tail}", handle)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            return [
                await asyncio.to_thread(ask, f"http://127.0.0.1:{port}", twice) for twice in (False, True)
            ]
        finally:
            await runner.cleanup()

    def ask(url: str, twice: bool) -> int:
        with between(url, twice=twice) as address:
            request = urllib.request.Request(f"{address}/api/v1/optim_step", data=str(twice).encode())
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=30.0) as answer:
                return int(json.load(answer)["times"])

    assert asyncio.run(run()) == [1, 2]
    assert seen == {"False": 1, "True": 2}


def test_a_share_is_the_least_of_all_cookbooks() -> None:
    found = compare({"new": [0.2] * 5 + [0.8] * 5, "old": [0.2] * 5 + [0.6] * 5}, [0.2] * 5 + [0.8] * 5)
    assert found["arithmetic_share"] == pytest.approx(0.75)
    assert found["arithmetic"]["old"] == {"begin": 0.2, "end": 0.6}


def test_what_does_not_hold_is_said() -> None:
    good = {
        **{"chunks_equal": True, "recipes_ok": 5, "recipes": 5, "unserved": 0, "replay_exact": 1.0},
        **{"kills_equal": 2, "kills_loops": 2, "arithmetic_share": 1.01, "polls_per_future": 1.0},
        "loss_error_worst": 1e-9,
    }
    assert not door.broken(good) and not door.short(good)
    bad = {
        **{"chunks_equal": False, "recipes_ok": 4, "unserved": 1, "unserved_calls": {"GET /x": 1}},
        **{"replay_exact": 0.95, "kills_equal": 1, "arithmetic_share": 0.8, "polls_per_future": np.nan},
        "loss_error_worst": 1.0,
    }
    for name, value in bad.items():
        more = {} if name != "unserved" else {"unserved_calls": bad["unserved_calls"]}
        said = door.broken(good | {name: value} | more) + door.short(good | {name: value} | more)
        assert len(said) == (name != "unserved_calls"), name


def test_examples_of_the_guide_are_there() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "door.md").read_text()
    named = re.findall(r"examples/door/[\w.-]+\w", guide)
    assert named and all((Path(__file__).parents[2] / name).is_file() for name in named)
