"""The planner: fleets, demands, estimates and measurements, and numbers that nothing can be planned from."""

from pathlib import Path
from typing import Any

import pytest

from antiphon.core.capacity.cover import Redundancy
from antiphon.core.capacity.estimate import GPUS, MODELS, sampling_rate
from antiphon.core.capacity.measured import measure
from antiphon.core.capacity.model import LoopShape, best_pace, pace
from antiphon.core.capacity.offers import build_offers, load_offers
from antiphon.core.capacity.planner import Plan, Planner, staleness_warning
from antiphon.core.config import load_config
from antiphon.core.config_sections import LoopSection
from antiphon.core.errors import ConfigError, InfeasibleError

EXAMPLES = Path(__file__).parents[3] / "examples" / "plan"


def plan(*overrides: str, idle: float | None = None, usd: float | None = None, **changes: Any) -> Plan:
    config = load_config(EXAMPLES / "eight-billion.yaml", list(overrides))
    tree = load_offers(EXAMPLES / "rented-gpus.yaml").model_dump()
    for key, value in changes.items():
        tree[key] = {**tree[key], **value} if isinstance(value, dict) else value
    return Planner(config, build_offers(tree), redundancy=Redundancy(0.95)).plan(idle, usd)


def test_a_large_enough_bound_gets_a_fleet_that_keeps_the_learner_busy() -> None:
    made = plan()
    assert made.chosen.supply >= made.required
    assert made.chosen.pace.wait_s == 0.0 and made.staleness_reached <= 4
    assert made.run_usd == pytest.approx(200 * made.chosen.usd_per_step)


def test_a_small_bound_is_planned_and_its_wait_told() -> None:
    made = plan("loop.max_staleness=0")
    shape, pace = made.chosen.shape, made.chosen.pace
    assert pace.wait_s > 0.0 and made.least_staleness > 0
    collect = max(shape.group_s, shape.completions / made.chosen.supply)
    assert pace.step_s == pytest.approx(shape.broadcast_s + collect + shape.train_s)
    cheaper = [one for one in made.by_workers if one.usd_per_step < made.chosen.usd_per_step - 1e-9]
    assert not cheaper


def test_seconds_fall_with_the_bound_and_with_workers() -> None:
    made = plan("loop.max_staleness=1", payload_share=1.0)
    steps = [one.pace.step_s for one in made.by_bound]
    assert steps == sorted(steps, reverse=True) and steps[made.least_staleness] == steps[-1]
    # One broadcast of all weights is longer than a step: they may not follow each other faster.
    assert made.chosen.shape.least_interval > 1 and made.least_staleness > 2


def test_groups_are_replaced_up_to_the_refill_limit_and_no_further() -> None:
    """Without a bound the slowest of 256 places would be refilled some 55 times."""
    steps = [
        plan(
            "loop.filter=refill",
            f"loop.refill_limit={limit}",
            "loop.max_staleness=0",
            task={"acceptance": 0.1},
        )
        for limit in (1.0, 2.0, 4.0)
    ]
    shapes = [made.chosen.shape for made in steps]
    assert shapes[0].place_s == shapes[0].group_s
    assert shapes[0].place_s < shapes[1].place_s < shapes[2].place_s < 8 * shapes[0].group_s


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        ({"idle": 0.01}, r"would wait \d+\.\d% of the time at least .* raise loop.max_staleness from 0 to 2"),
        ({"usd": 5.0}, r"200 steps cost at least \$\d+"),
    ],
)
def test_a_demand_that_nothing_meets_is_a_sentence_with_numbers(demand: dict[str, float], words: str) -> None:
    with pytest.raises(InfeasibleError, match=words) as caught:
        plan("loop.max_staleness=0", **demand)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("name", "sampled", "trained"), [("none", 1, 1), ("drop", 1, 0.8), ("refill", 1.25, 1)]
)
def test_acceptance_enters_by_the_filter(name: str, sampled: float, trained: float) -> None:
    """Of 2,048 completions a step, 80% of them varied: what is sampled, and what is trained on."""
    made, all_s = plan(f"loop.filter={name}"), plan("loop.filter=none").chosen.shape.train_s
    shape = made.chosen.shape
    assert shape.train_s == pytest.approx(trained * all_s)
    assert made.required == pytest.approx(sampled * 2048 / shape.train_s)
    assert made.acceptance == 0.8


def test_no_completion_is_planned_longer_than_it_may_be() -> None:
    made = plan(
        "sampling.max_tokens=3000", task={"completion_tokens": 2000.0, "spread": 1.5, "reward_s": 0.0}
    )
    slowest = min(made.rates.values(), key=lambda rate: rate.sampling.tokens_per_s / rate.sampling.at_once)
    assert slowest.group_s == pytest.approx(3000 * slowest.sampling.at_once / slowest.sampling.tokens_per_s)


def test_the_publish_interval_is_short_enough_that_versions_are_sampled_in_time() -> None:
    """30B over 581 Mbit/s: kappa = 7 would wait for seven batches of one version, 393 s a step."""
    shape = LoopShape(2048, train_s=120.0, broadcast_s=842.0, group_s=60.0)
    supply = 2048 / 256.0
    assert pace(shape, 6, 7, supply).step_s == pytest.approx((842 + 7 * 256 + 120) / 7)
    best = best_pace(shape, 6, supply)
    assert (best.publish_interval, best.step_s) == (3, pytest.approx(842 / 3))


def test_too_few_offers_are_said() -> None:
    made = plan(workers=({"name": "l4", "gpu": "L4", "usd_per_hour": 0.3, "most": 2},))
    assert made.chosen.workers == 2 and made.chosen.pace.regime == "sampling"
    assert any("2 workers offered" in note for note in made.notes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learner": {"usd_per_hour": None}}, "learner has no usd_per_hour"),
        ({"learner": {"usd_per_hour": -3.0}}, "learner costs usd_per_hour=-3"),
        ({"workers": ({"name": "a", "gpu": "L4", "usd_per_hour": 5e6},)}, "costs usd_per_hour=5e"),
        ({"workers": ({"name": "a", "gpu": "L4"},)}, "workers a has no usd_per_hour"),
        ({"workers": ({"name": "a", "tokens_per_s": 0.0, "usd_per_hour": 1.0},)}, "tokens_per_s=0"),
        ({"workers": ({"name": "a", "gpu": "Z80", "usd_per_hour": 1.0},)}, "nothing is known of the GPU Z80"),
        ({"workers": ({"name": "a", "usd_per_hour": 1.0},)}, "the rate of workers a is not known"),
        ({"workers": ()}, "no workers are offered"),
        ({"task": {"acceptance": 0.0}}, "task.acceptance=0"),
        ({"model": "some/model"}, "nothing is known of the size of some/model"),
    ],
)
def test_numbers_that_cannot_be_planned_with_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InfeasibleError, match=words):
        plan(**changes)


def test_a_missing_file_of_offers_is_named() -> None:
    with pytest.raises(ConfigError, match=r"there are no offers at nowhere\.yaml"):
        load_offers(Path("nowhere.yaml"))


@pytest.mark.parametrize(
    ("gpu", "weight_bytes", "tokens_per_s"),
    [
        ("H200", 2.0, 4900),
        ("H100", 2.0, 3000),
        ("A100", 2.0, 1850),
        ("RTX5090", 2.0, 800),
        ("RTX5090", 1.0, 1450),
    ],
)
def test_the_roofline_gives_what_is_known_of_8b(gpu: str, weight_bytes: float, tokens_per_s: float) -> None:
    found = sampling_rate(MODELS["Qwen/Qwen3-8B"], GPUS[gpu], 1, 4096, 4096, weight_bytes)
    assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=0.1)


def test_a_run_log_gives_rates_and_acceptance() -> None:
    plan_numbers = {
        "plan_train_s": 2.0,
        "plan_broadcast_s": 0.5,
        "plan_group_s": 4.0,
        "plan_place_s": 4.0,
        "plan_acceptance": 0.75,
        "plan_supply_tokens_per_s": 80.0,
        "plan_need_tokens_per_s": 16 * 50.0 / 2.0,
    }
    lines = [
        {
            "batch": {
                "trajectories": 12,
                "groups_filtered": 1,
                "groups_dropped_stale": 0,
                "completion_tokens_mean": 50.0,
            },
            "timings": {"wall_s": 10.0 * step, "workers": {"a": 8, "b": 4}, **plan_numbers},
        }
        for step in range(4)
    ]
    loop = LoopSection(prompts_per_step=4, group_size=4)
    found = measure(lines, loop)
    assert found.acceptance == pytest.approx(12 / 16) and found.seconds == (2.0, 0.5, 4.0, 4.0)
    assert found.tokens_per_s == 40.0 and found.step_s == 10.0
    assert found.completion_tokens == pytest.approx(50.0)
    with pytest.raises(InfeasibleError, match="no trained batch"):
        measure([], loop)


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["loop.max_staleness=6"], True),
        (["loop.max_staleness=6", "learner.learning_rate=6.0e-7"], False),
        (["loop.max_staleness=2"], False),
        ([], False),
    ],
)
def test_a_raised_bound_wants_a_lower_learning_rate(overrides: list[str], warned: bool) -> None:
    path = EXAMPLES / "eight-billion.yaml"
    warning = staleness_warning(load_config(path, overrides), load_config(path))
    assert (warning is not None) == warned
    assert not warned or (warning is not None and "6.7e-07 is as safe" in warning)
