"""Kill roles: one process of a run with light engines.

    python -m antiphon.benchmarks.parts.kills.roles ROLE FOLDER

Roles are coordinator, learner, reward, flow and worker-N. Each runs what production serves, over
real gRPC on the ports that the folder's `ports.json` names (with `deepspeed` there, the real
learner), and writes `ROLE.ready` when it can work. Started again with the same words it continues.
"""

import json
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from antiphon.core.config import load_config
from antiphon.system.processes import StopRequest, run_service, write_ready_file

HOST = "127.0.0.1"
ENGINE_STEP_S = 0.002
"""What one token takes, so that groups are in flight when something dies."""


def coordinator(folder: Path, ports: dict[str, int], stop: StopRequest) -> Coroutine[Any, Any, None]:
    """Serve the coordinator."""
    from antiphon.services.coordinator.journal.journal import JOURNAL_NAME
    from antiphon.services.coordinator.server import serve_coordinator
    from antiphon.simulator.standins.engines import ArithmeticPrompts

    config, ready = load_config(folder / "config.yaml"), _ready(folder, "coordinator")
    place = _place(folder)
    return serve_coordinator(
        config,
        config.run.name,
        place,
        place / "store",
        HOST,
        ports["coordinator"],
        ready,
        ArithmeticPrompts(),
        stop=stop,
        wait_for_journal=(place / JOURNAL_NAME).exists(),  # as a supervisor has it at each further start
    )


def learner(folder: Path, ports: dict[str, int], stop: StopRequest) -> Coroutine[Any, Any, None]:
    """Serve the learner."""
    from antiphon.services.learner.server import OpenLearner, serve_learner

    open_service: OpenLearner | None = None
    if not ports.get("deepspeed"):
        from antiphon.benchmarks.parts.kills.standins import open_light_learner

        open_service = open_light_learner
    config, ready = load_config(folder / "config.yaml"), _ready(folder, "learner")
    address, place = f"{HOST}:{ports['coordinator']}", _place(folder)
    return serve_learner(
        config,
        config.run.name,
        place,
        place / "store",
        address,
        HOST,
        ports["learner"],
        ready,
        open_service,
        stop=stop,
    )


def reward(folder: Path, ports: dict[str, int], stop: StopRequest) -> Coroutine[Any, Any, None]:
    """Serve a reward service."""
    from antiphon.services.reward.server import serve_reward
    from antiphon.simulator.standins.engines import ArithmeticEnvironment, JsonDecoder

    config = load_config(folder / "config.yaml")
    reward_with = (ArithmeticEnvironment(config, reward_rarity=1), JsonDecoder())
    address = f"{HOST}:{ports['coordinator']}"
    ready = _ready(folder, "reward")
    return serve_reward(config, config.run.name, address, HOST, 0, ready, reward_with, stop=stop)


def worker(folder: Path, ports: dict[str, int], stop: StopRequest, name: str) -> Coroutine[Any, Any, None]:
    """Run a worker."""
    from antiphon.benchmarks.parts.imposed_worker import ImposedEngine, WorkerOrder
    from antiphon.benchmarks.parts.kills import standins
    from antiphon.services.rollout.process import serve_worker

    run_id = load_config(folder / "config.yaml").run.name
    address, chunks = f"{HOST}:{ports['coordinator']}", folder / name
    link_s = float(os.environ.get(standins.LINK_VARIABLE, "0"))
    after = os.environ.get(standins.AFTER_VARIABLE)
    hangs_after = float(os.environ.get(standins.HANG_VARIABLE, "inf"))
    order = WorkerOrder(name, ENGINE_STEP_S, hangs_after=hangs_after)

    async def serve() -> None:
        if after is not None:
            await standins.wait_for_file(folder / after)
        await serve_worker(
            address,
            name,
            run_id,
            chunks,
            lambda: _ready(folder, name)(0),
            lambda config: ImposedEngine(order, told=folder / f"{name}.hung"),
            lambda config: standins.LinkedSource(chunks, config, link_s),
            standins.WitnessClient(address, folder / f"{name}.acknowledged", link_s),
            stop=stop,
        )

    return serve()


def flow(folder: Path, ports: dict[str, int], stop: StopRequest) -> Coroutine[Any, Any, None]:
    """Drive the run: publish, open steps, train, finish; begun again, it continues where the run is."""
    from antiphon.services.coordinator.client import CoordinatorClient
    from antiphon.services.learner.client import LearnerClient
    from antiphon.simulator.processes import Flow

    async def drive() -> None:
        coordinator = CoordinatorClient(f"{HOST}:{ports['coordinator']}")
        learner = LearnerClient(f"{HOST}:{ports['learner']}")
        _ready(folder, "flow")(0)
        try:
            await Flow(load_config(folder / "config.yaml"), coordinator, learner).run()
        finally:
            await learner.close()
            await coordinator.close()

    return drive()


def _place(folder: Path) -> Path:
    """Return where journal and store lie: on a disk of their own, where the run has one."""
    disk = folder / "disk"
    return disk if disk.is_dir() else folder


def _ready(folder: Path, role: str) -> Callable[[int], None]:
    return lambda port: write_ready_file(folder / f"{role}.ready", port)


def main() -> int:
    """Live the role that the command line names."""
    role, folder = sys.argv[1], Path(sys.argv[2])
    ports: dict[str, int] = json.loads((folder / "ports.json").read_text())
    roles = {"coordinator": coordinator, "learner": learner, "reward": reward, "flow": flow}
    if role in roles:
        return run_service(lambda stop: roles[role](folder, ports, stop))
    return run_service(lambda stop: worker(folder, ports, stop, role))


if __name__ == "__main__":
    sys.exit(main())
