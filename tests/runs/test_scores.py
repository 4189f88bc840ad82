"""A living run measures a score that is missing; the one that asks is told it, or why there is none."""

import asyncio
from pathlib import Path

import pytest

from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.runs.attach import _score
from tests.support.light_parties import run_parties, served
from tests.support.loop_model import RUN_ID, light_manifest, make_config

CONFIG = make_config(steps=3, evaluation_prompts=4)


def test_a_missing_score_is_measured_and_a_known_one_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(CONFIG, tmp_path) as site:
            client = site.client()
            await client.announce_snapshot(light_manifest(0))
            asked = asyncio.ensure_future(_score(client, RUN_ID, 0, True, 20.0))
            await run_parties(site.client(), CONFIG, seed=3)
            score = await asked
            assert score.complete and score.version == 0 and score.prompts == 4
            assert await _score(client, RUN_ID, 0, False, 0.0) == score
            with pytest.raises(ConfigError, match=r"--version 1 of run-1 was not evaluated .* versions: 0"):
                await _score(client, RUN_ID, 1, False, 1.0)

    asyncio.run(run())


def test_a_score_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(CONFIG, tmp_path) as site:
            client = site.client()
            with pytest.raises(ConfigError, match="--version 0 of run-1 is not published; newest is None"):
                await _score(client, RUN_ID, 0, True, 1.0)
            await client.announce_snapshot(light_manifest(0))
            with pytest.raises(UnavailableError, match=r"took longer than 0\.1 s; it waits"):
                await _score(client, RUN_ID, 0, True, 0.1)
            await client.pause("enough")
            with pytest.raises(UnavailableError, match="not evaluated: the run is paused: enough"):
                await _score(client, RUN_ID, 0, True, 20.0)

    asyncio.run(run())
