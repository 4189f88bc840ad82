"""Make the demo's base model from nothing, or check that it still comes out the same; it takes minutes.

scripts/warmstart chain-sum --out DIR
scripts/warmstart chain-sum --check examples/models/chain-sum
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from antiphon.benchmarks.parts.warmstart.build import check_warmstart, warmstart
from antiphon.benchmarks.parts.warmstart.recipe import RECIPES


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
    with Progress(console=Console(stderr=True)) as bar:
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
