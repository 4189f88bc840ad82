"""Learning rate: one that suits a model's size, and the share of it that each optimizer update has.

A linear warm-up to 1, and then constant, linear or cosine to `final_rate_share` at the end of the run
(cosine: Loshchilov and Hutter, arXiv 1608.03983, without restarts).
"""

import math
from collections.abc import Callable

from antiphon.core.config_sections import LearnerSection

WARMUP_STEPS = 5
"""Steps of warm-up where the configuration names none; at most half of the run."""


RATE_BY_SIZE = ((10_000_000, 2e-4), (100_000_000, 2e-5))
"""Models of fewer parameters -> learning rate where the configuration names none."""
LEAST_RATE = 1e-6
"""Of all larger ones: usual for reinforcement learning of all weights of pretrained models, which much more
ruins within steps."""
ADAPTER_TIMES = 10
"""How much more adapters learn with: B begins at zero, and a step moves W by the product of the two only
("LoRA Without Regret", Thinking Machines 2025, finds about ten for all sizes)."""


def rate_by_size(parameters: int, adapters: bool = False) -> float:
    """Return the learning rate of a model of this many parameters, or of adapters to it.

    >>> rate_by_size(450_000), rate_by_size(494_032_768), rate_by_size(494_032_768, adapters=True)
    (0.0002, 1e-06, 1e-05)
    """
    rate = next((rate for most, rate in RATE_BY_SIZE if parameters < most), LEAST_RATE)
    return round(rate * ADAPTER_TIMES, 12) if adapters else rate


def warmup_steps(section: LearnerSection, steps: int) -> int:
    """Return the learner steps of warm-up in a run of this many steps."""
    return min(WARMUP_STEPS, steps // 2) if section.warmup_steps is None else section.warmup_steps


def rate_share(section: LearnerSection, steps: int, updates_per_step: int) -> Callable[[int], float]:
    """Return the function from an update's number, which begins at 0, to the share of the rate, 0..1.

    Args:
        section: names the schedule.
        steps: learner steps of the run.
        updates_per_step: optimizer updates of each.
    """
    warmup = warmup_steps(section, steps) * updates_per_step
    falling = steps * updates_per_step - warmup

    def share(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        if section.schedule == "constant":
            return 1.0
        # The first update after warm-up has the whole rate; one after the run's last would have the least.
        done = min(1.0, (update - warmup) / falling) if falling > 0 else 1.0
        height = 1.0 - done if section.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
        return section.final_rate_share + (1.0 - section.final_rate_share) * height

    return share
