"""Programs can be judged on other machines: by further copies of the service, with an address and a token."""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from antiphon.core.config import build_config
from antiphon.core.errors import ContractError
from antiphon.core.records import FinishReason, GroupSubmission, Trajectory, VersionSpan
from antiphon.environments.registry import environment_of
from antiphon.net.rpc.serving import Security, start_server, stop_server
from antiphon.net.security.credentials import needed_token_key
from antiphon.net.security.guard import Guard
from antiphon.services.coordinator.server import register_coordinator
from antiphon.services.reward.server import serve_reward
from antiphon.system.clock import wall_clock
from tests.support.bubblewrap import needs_bubblewrap
from tests.support.light_coordinator import LightCoordinator
from tests.support.secured import make_house

DEADLINE_S = 60.0
RUN_ID = "run-1"
PROGRAMS = ("def f(n): return 2 * n", "def f(n): return 4", "while True: pass")


class Codec:
    """A token is a program."""

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(PROGRAMS[token] for token in token_ids)


def group(number: int) -> tuple[str, GroupSubmission]:
    trajectories = tuple(
        Trajectory(
            np.array([token], dtype=np.int32),
            np.zeros(1, dtype=np.float32),
            (VersionSpan(0, 0, 1),),
            FinishReason.LENGTH,
            sample_index=token,
            seed=token,
        )
        for token in range(len(PROGRAMS))
    )
    return "train-0-0", GroupSubmission(f"lease-{number}", f"g{number}", "w-1", trajectories, 0.0)


def test_a_second_copy_of_the_service_judges_over_the_network_with_a_token(tmp_path: Path) -> None:
    needs_bubblewrap()
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({"question": "Double.", "tests": ["assert f(2) == 4", "assert f(3) == 6"]}) + "\n"
    )
    parameters = {"train": str(path), "heldout": str(path), "score": "programs", "credit": "share"}
    config = build_config(
        {
            "environment": {"name": "file", "parameters": parameters, "train_size": 1, "heldout_size": 1},
            "loop": {"prompts_per_step": 1},
            "evaluation": {"prompts": 1},
            "reward": {"answer_timeout_s": 2.0, "processes": 1},
            "services": {"stall_timeout_s": 20.0},
        }
    )
    keys = make_house(tmp_path / "keys").services
    stranger = make_house(tmp_path / "others").services

    async def story() -> None:
        coordinator = LightCoordinator(config, RUN_ID)
        guard = Guard(needed_token_key(keys), RUN_ID, wall_clock, asyncio.get_running_loop().time)
        server, port = await start_server(
            *("127.0.0.1", 0, lambda server: register_coordinator(server, coordinator)),
            *(["antiphon.Coordinator"], Security(keys, guard)),
        )

        def copy(credentials=keys) -> "asyncio.Task[None]":  # type: ignore[no-untyped-def]
            with_ = environment_of(config.environment), Codec()
            address = f"127.0.0.1:{port}"
            serving = serve_reward(
                config, RUN_ID, address, "127.0.0.1", 0, lambda bound: None, with_, credentials
            )
            return asyncio.create_task(serving)

        with pytest.raises(ContractError, match="certificates"):
            await copy(stranger)
        copies = [copy(), copy()]
        try:
            coordinator.to_reward.extend(group(number) for number in range(4))
            await coordinator.until(lambda: len(coordinator.rewards) == 4, DEADLINE_S)
            coordinator.finished = True
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(*copies)
        finally:
            for one in copies:
                one.cancel()
            await stop_server(server, grace_s=0.1)
        for rewards in coordinator.rewards.values():
            assert [(one.reward, one.failure) for one in rewards] == [(1.0, ""), (0.5, ""), (0.0, "")]

    asyncio.run(story())
