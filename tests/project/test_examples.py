"""Every shipped example can be loaded, and those about clips have clips that act."""

from pathlib import Path

import pytest

from antiphon.core.capacity.cover import Redundancy
from antiphon.core.capacity.estimate import MODELS, find_gpu
from antiphon.core.capacity.model_shape import SHAPES
from antiphon.core.capacity.offers import build_offers, load_offers
from antiphon.core.capacity.planner import Planner
from antiphon.core.config import load_config
from antiphon.core.ranks.memory import check_memory
from antiphon.simulator.scenario import load_scenario

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(
    [*(ROOT / "examples").glob("*.yaml"), *(ROOT / "examples" / "own-objective").glob("*.yaml")]
)
TO_BEGIN_WITH = sorted((ROOT / "examples" / "models").glob("*.yaml"))
CARDS = {
    "qwen3-0.6b": "RTX4090",
    "qwen3-4b-lora": "L40S",
    "qwen3-8b-node": "H100",
    "qwen3-30b-a3b-lora": "H100",
}
"""With the memory that the files name."""
SCENARIOS = {"preemption_storm.yaml"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_can_be_loaded_and_every_key_in_it_acts(path: Path) -> None:
    if path.name in SCENARIOS:
        assert load_scenario(path).run_config().idle_keys() == ()
        return
    config = load_config(path)
    assert config.idle_keys() == ()
    assert config.run.name == path.stem.replace("_", "-")
    assert (ROOT / config.model.path / "config.json").is_file()


@pytest.mark.parametrize("path", TO_BEGIN_WITH, ids=lambda path: path.stem)
def test_a_configuration_to_begin_with_is_loaded_and_planned(path: Path) -> None:
    config = load_config(path)
    assert config.idle_keys() == () and config.run.name == path.stem
    assert config.model.path in MODELS
    offers = load_offers(ROOT / "examples" / "plan" / "rented-gpus.yaml")
    needed = find_gpu(CARDS[path.stem]).memory_bytes
    tree = offers.model_dump()
    tree["workers"] = [one for one in tree["workers"] if find_gpu(one["gpu"]).memory_bytes >= needed]
    made = Planner(config, build_offers(tree), redundancy=Redundancy(0.95)).plan(None, None)
    assert made.chosen.supply > 0 and made.run_usd > 0
    shape = SHAPES[config.model.path]
    check_memory(config, shape.tensors(), shape, needed, gpus=True)


@pytest.mark.parametrize(("name", "objective"), [("clipped_updates", "dapo"), ("gspo", "gspo")])
def test_the_presets_clip_from_the_second_update_of_a_step(name: str, objective: str) -> None:
    config = load_config(ROOT / "examples" / f"{name}.yaml")
    demo = load_config(ROOT / "examples" / "quickstart.yaml")
    assert config.algorithm.objective == objective and config.algorithm.updates_per_step == 4
    # Apart from name, objective and rate they are the demo, so that figures can be compared.
    assert config.loop == demo.loop and config.environment == demo.environment
    assert config.sampling == demo.sampling and config.evaluation == demo.evaluation


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *(("file", set()), ("math", set()), ("code", set()), ("reasoning", set()), ("judge", {"judge"})),
        ("poker", {"model", "sampling"}),
    ],
)
def test_an_example_of_a_task_is_the_demo_with_another_environment(name: str, more: set[str]) -> None:
    config, demo = (load_config(ROOT / "examples" / f"{one}.yaml") for one in (name, "quickstart"))
    differ = {section for section, _ in config if getattr(config, section) != getattr(demo, section)}
    assert differ - {"evaluation"} == {"run", "environment", *more}


def test_the_example_with_a_judge_is_that_from_a_file_with_another_score() -> None:
    config, file = (load_config(ROOT / "examples" / f"{name}.yaml") for name in ("judge", "file"))
    ours, theirs = config.environment.parameters, file.environment.parameters
    assert {name for name in ours if ours[name] != theirs[name]} == {"score"}
