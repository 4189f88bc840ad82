"""Warm start: the demo's base model from nothing, the same bytes on every repetition.

The recipe is the only input, so the digest of the weights can be checked by making them again
on a machine of the same kind (another CPU generation or library version may round otherwise;
both are recorded beside the weights). It takes minutes.

    scripts/warmstart chain-sum --out DIR
    scripts/warmstart chain-sum --check examples/models/chain-sum
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress as Bar

from antiphon.benchmarks.parts.warmstart.imitation import Progress, deterministic, imitate
from antiphon.benchmarks.parts.warmstart.recipe import RECIPES, WarmstartRecipe, recipe_as_json
from antiphon.benchmarks.parts.warmstart.tiny_model import (
    WEIGHTS,
    build_model,
    build_tokenizer,
    save_tiny_model,
)
from antiphon.core.digests import digest_file
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.environments.reasoning.prompts import FAMILY, ReasoningEnvironment

RECORD = "warmstart.json"
"""Name of the file that says how a model directory was made."""


@dataclass(frozen=True, slots=True)
class WarmstartResult:
    """What a warm start left behind."""

    model_dir: Path
    weights_digest: str
    """blake3 of model.safetensors."""
    parameters: int
    steps: int
    tokens: int
    """Tokens seen, padding included."""
    final_loss: float
    """Mean over the last phase's final tenth, nats per completion token."""


@dataclass(frozen=True, slots=True)
class WarmstartCheck:
    """What came of making a committed model again."""

    expected: str
    """Digest of the committed weights."""
    found: str
    """Digest of the weights made now."""
    differences: Mapping[str, tuple[str, str]]
    """What differs from the machine of the record: name -> (there, here). Only when this is
    empty must the digests agree."""

    @property
    def agrees(self) -> bool:
        return self.expected == self.found


def warmstart(recipe: WarmstartRecipe, out: Path, progress: Progress) -> WarmstartResult:
    """Train the recipe's model from nothing and write it to `out`.

    Args:
        recipe: decides every byte of the weights.
        out: model directory; made if missing, its files are replaced once training is over.
        progress: called after every step.

    Raises:
        ConfigError: when the recipe cannot be followed.
        IntegrityError: when the loss stops being a number; nothing is written then.
    """
    # Demonstrations of a short problem may come again, as they have since the demo's model was made.
    environment = ReasoningEnvironment(
        recipe.environment.removeprefix(f"{FAMILY}/"),
        recipe.parameters,
        recipe.seed,
        train_size=recipe.problems,
        heldout_size=1,
        repeats=True,
    )
    tokenizer = build_tokenizer(environment.problem("train", 0).text, recipe.shape)
    model = build_model(recipe.shape, recipe.seed)
    with deterministic():
        losses, tokens = imitate(model, tokenizer, environment, recipe, progress)
    tail = losses[-max(1, recipe.phases[-1].steps // 10) :]
    weights = save_tiny_model(model, tokenizer, out)
    result = WarmstartResult(
        model_dir=out,
        weights_digest=digest_file(weights),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        steps=recipe.steps,
        tokens=tokens,
        final_loss=round(sum(tail) / len(tail), 6),
    )
    found = {name: value for name, value in asdict(result).items() if name != "model_dir"}
    record = {"recipe": recipe_as_json(recipe), "result": found, "made_with": made_with()}
    (out / RECORD).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    return result


def check_warmstart(recipe: WarmstartRecipe, model_dir: Path, progress: Progress) -> WarmstartCheck:
    """Make a committed model again and compare the digests; `model_dir` is only read.

    Raises:
        ConfigError: when the directory has no record, or was made by another recipe.
        IntegrityError: when its weights are not those of its own record.
    """
    path = model_dir / RECORD
    if not path.is_file():
        raise ConfigError(f"{path} is missing; make the model with `scripts/warmstart` first")
    record = json.loads(path.read_text())
    if record["recipe"] != recipe_as_json(recipe):
        raise ConfigError(f"{path} was made by another recipe than {recipe.name!r}; make the model again")
    expected = record["result"]["weights_digest"]
    present = digest_file(model_dir / WEIGHTS)
    if present != expected:
        raise IntegrityError(
            f"{model_dir / WEIGHTS} has digest {present}, but {path.name} says {expected}; "
            "restore both from one commit or make the model again"
        )
    with tempfile.TemporaryDirectory() as scratch:
        found = warmstart(recipe, Path(scratch), progress).weights_digest
    here = made_with()
    differences = {
        name: (there, here.get(name, "none"))
        for name, there in record["made_with"].items()
        if there != here.get(name)
    }
    return WarmstartCheck(expected=expected, found=found, differences=differences)


def made_with() -> dict[str, str]:
    """Return what rounding may depend on: library versions, processor, vector instructions."""
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "reasoning-gym")
    versions = {package: metadata.version(package) for package in packages}
    return {
        **versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": "1",
    }


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="scripts/warmstart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=sorted(RECIPES))
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="model directory to write")
    what.add_argument("--check", type=Path, help="model directory to make again and compare with; only read")
    options = parser.parse_args()
    recipe = RECIPES[options.recipe]
    with Bar(console=Console(stderr=True)) as bar:
        task = bar.add_task(options.recipe, total=None)

        def progress(done: int, steps: int, loss: float) -> None:
            bar.update(task, total=steps, completed=done, description=f"{options.recipe}, loss {loss:.3f}")

        if options.out is not None:
            result = warmstart(recipe, options.out, progress)
            print(f"{result.parameters:,} parameters in {result.model_dir}, digest {result.weights_digest}")
            return 0
        outcome = check_warmstart(recipe, options.check, progress)
    if outcome.agrees:
        print(f"the same weights came out: {outcome.found}")
        return 0
    print(f"committed {outcome.expected}\nmade now  {outcome.found}")
    for name, (there, here) in outcome.differences.items():
        print(f"{name}: {there} there, {here} here")
    return 0 if outcome.differences else 1


if __name__ == "__main__":
    sys.exit(main())
