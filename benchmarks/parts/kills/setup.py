"""Kill setup: the run that is killed, and its processes.

A step of it takes a fraction of a second, so that there are many within a lease period.
"""

from collections.abc import Mapping

from antiphon.benchmarks.parts.kills.standins import HANG_VARIABLE, LINK_VARIABLE
from antiphon.core.config import RunConfig, build_config

WORKERS = 3
HANGING = "worker-hanging"
TROUBLED: Mapping[str, Mapping[str, str]] = {
    "worker-joining": {LINK_VARIABLE: "none"},
    "worker-slow": {LINK_VARIABLE: "1.0"},
    HANGING: {HANG_VARIABLE: "12"},
}
"""Workers that do badly, and what the environment of each has for it."""


def make_config(
    mode: str, steps: int, model: str = "", name: str = "killed", store: str | None = None
) -> RunConfig:
    """Return a run of many small steps, two of them ahead; `model` is a real learner's."""
    return build_config(
        {
            "run": {"name": name, "steps": steps, "seed": 5},
            "environment": {"train_size": 40, "heldout_size": 4},
            "evaluation": {"prompts": 4, "interval": 0},
            "loop": {"mode": mode, "max_staleness": 2, "prompts_per_step": 6, "group_size": 4},
            "sampling": {"max_tokens": 24},
            "rollout": {"concurrent_groups": 4},
            "learner": {"checkpoint_interval": 3},
            "coordinator": {
                "lease_s": 3.0,
                "heartbeat_s": 0.4,
                "payload_retention_steps": 2,
                "journal_url": store,
            },
            "broadcast": {"snapshots_kept": 16},
            "services": {"stall_timeout_s": 120.0},
            "drafting": {"enabled": False},
            **({"model": {"path": model}} if model else {}),
        }
    )


def roles(troubled: bool = False) -> list[str]:
    """Return the processes of a run, in the order in which they start."""
    names = [f"worker-{i}" for i in range(WORKERS)]
    workers = [*names[:-1], *TROUBLED] if troubled else names  # each process takes time to start
    return ["coordinator", "learner", "reward", *workers, "flow"]
