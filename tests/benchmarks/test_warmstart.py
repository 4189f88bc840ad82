"""The warm start: the recipe decides every byte, the record says how, and the check notices changes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from antiphon.benchmarks.parts.warmstart.build import RECORD, check_warmstart, warmstart
from antiphon.benchmarks.parts.warmstart.imitation import learning_rate, orthogonalise
from antiphon.benchmarks.parts.warmstart.recipe import (
    CHAIN_SUM,
    RECIPES,
    Habit,
    Phase,
    WarmstartRecipe,
    recipe_as_json,
)
from antiphon.benchmarks.parts.warmstart.tiny_model import WEIGHTS, ModelShape
from antiphon.core.digests import digest_file
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.environments.registry import make_environment

COMMITTED = Path(__file__).parents[2] / "examples" / "models" / CHAIN_SUM.name

SHORT = replace(
    CHAIN_SUM,
    shape=ModelShape(hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, mlp_size=64),
    phases=tuple(replace(phase, steps=4, warmup_steps=2) for phase in CHAIN_SUM.phases),
    batch_tokens=512,
    bucket=32,
    problems=200,
)


def quiet(done: int, total: int, loss: float) -> None:
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warmstart(SHORT, tmp_path_factory.mktemp("warm"), quiet).model_dir


def test_the_same_recipe_makes_the_same_bytes_and_another_seed_others(made: Path, tmp_path: Path) -> None:
    torch.rand(7)  # the global generator must not matter
    again = warmstart(SHORT, tmp_path / "again", quiet)
    other = warmstart(replace(SHORT, seed=1), tmp_path / "other", quiet)
    assert again.weights_digest == digest_file(made / WEIGHTS) != other.weights_digest
    for file in made.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_torch_is_left_as_it_was(tmp_path: Path) -> None:
    before = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.initial_seed())
    warmstart(replace(SHORT, phases=SHORT.phases[:1]), tmp_path, quiet)
    assert before == (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.initial_seed(),
    )


def test_progress_counts_every_step(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = warmstart(SHORT, tmp_path, lambda done, total, loss: seen.append((done, total)))
    assert seen == [(done, 8) for done in range(1, 9)]
    assert result.steps == SHORT.steps == 8


def test_the_loss_falls(tmp_path: Path) -> None:
    losses: list[float] = []
    phase = replace(SHORT.phases[0], steps=30, warmup_steps=5)
    warmstart(replace(SHORT, phases=(phase,)), tmp_path, lambda done, total, loss: losses.append(loss))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_the_record_names_recipe_digest_and_versions(made: Path) -> None:
    record = json.loads((made / RECORD).read_text())
    assert record["recipe"] == recipe_as_json(SHORT)
    assert record["result"]["weights_digest"] == digest_file(made / WEIGHTS)
    assert {"torch", "transformers", "cpu_capability"} <= set(record["made_with"])


def test_the_check_makes_the_model_again(made: Path) -> None:
    check = check_warmstart(SHORT, made, quiet)
    assert check.agrees
    assert check.differences == {}


def test_the_check_refuses_altered_weights_other_recipes_and_empty_places(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        check_warmstart(SHORT, tmp_path, quiet)
    with pytest.raises(ConfigError, match="another recipe"):
        check_warmstart(replace(SHORT, seed=9), made, quiet)
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = bytearray((tmp_path / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (tmp_path / WEIGHTS).write_bytes(weights)
    with pytest.raises(IntegrityError, match="digest"):
        check_warmstart(SHORT, tmp_path, quiet)


def test_a_loss_that_is_no_number_leaves_nothing_behind(tmp_path: Path) -> None:
    wild = replace(SHORT.phases[0], learning_rate=float("nan"), final_learning_rate=float("nan"))
    with pytest.raises(IntegrityError, match="learning_rate"):
        warmstart(replace(SHORT, phases=(wild,)), tmp_path / "out", quiet)
    assert not (tmp_path / "out").exists()


def test_a_recipe_needs_a_phase() -> None:
    with pytest.raises(ConfigError, match="phases"):
        WarmstartRecipe(name="empty", parameters={}, phases=())


def test_the_learning_rate_warms_up_and_falls_to_its_end() -> None:
    phase = Phase(
        steps=100, learning_rate=1.0, final_learning_rate=0.1, habits={Habit.BLURT: 1.0}, warmup_steps=10
    )
    rates = [learning_rate(phase, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0) == pytest.approx(rates[10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("shape", [(2, 8, 8), (1, 4, 16), (3, 16, 4)])
def test_orthogonal_updates_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert orthogonalise(matrices).shape == shape
    assert values.min() > 0.3 and values.max() < 1.4


@pytest.mark.parametrize(
    "name", sorted({path.parent.name for path in COMMITTED.parent.glob(f"*/{RECORD}")} & RECIPES.keys())
)
def test_the_committed_model_is_the_one_its_record_describes(name: str) -> None:
    directory = COMMITTED.parent / name
    record = json.loads((directory / RECORD).read_text())
    assert record["recipe"] == recipe_as_json(RECIPES[name])
    assert record["result"]["weights_digest"] == digest_file(directory / WEIGHTS)
    assert sum(file.stat().st_size for file in directory.iterdir()) < 4 << 20
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    recipe = RECIPES[name]
    environment = make_environment(recipe.environment, recipe.parameters, 0, 8, 8)
    problem = environment.problem("heldout", 0)
    ids = tokenizer(problem.text, return_tensors="pt")["input_ids"]
    written = model.generate(ids, do_sample=False, max_new_tokens=160)[0, ids.shape[1] :]
    assert written[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(written, skip_special_tokens=True)
    assert text.startswith("<think>") and text.endswith("</answer>")
