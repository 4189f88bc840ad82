"""warmstart: make the demo's base model from nothing, or check that it still comes out the same."""

from pathlib import Path

from antiphon.core.errors import ConfigError


def warmstart(
    recipe: str = "chain-sum",
    /,
    *,
    out: Path | None = None,
    check: Path | None = None,
) -> int:
    """Train a small base model on worked solutions of mixed quality; it takes minutes.

    Args:
        recipe: which recipe to follow.
        out: model directory to write.
        check: model directory to make again and compare with; it is only read.
    """
    if (out is None) == (check is None):
        raise ConfigError("warmstart needs either --out DIR to write a model or --check DIR to compare one")
    from rich.console import Console
    from rich.progress import Progress

    from antiphon.services.learner.warmstart.build import check_warmstart, warmstart
    from antiphon.services.learner.warmstart.recipe import RECIPES

    if recipe not in RECIPES:
        raise ConfigError(f"there is no recipe {recipe}; choose of {', '.join(sorted(RECIPES))}")
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(f"warm start {recipe}", total=None)

        def progress(done: int, steps: int, loss: float) -> None:
            bar.update(task, total=steps, completed=done, description=f"warm start {recipe}, loss {loss:.3f}")

        if out is not None:
            result = warmstart(RECIPES[recipe], out, progress)
            print(f"{result.parameters:,} parameters in {result.model_dir}, digest {result.weights_digest}")
            return 0
        assert check is not None
        outcome = check_warmstart(RECIPES[recipe], check, progress)
    if outcome.agrees:
        print(f"the same weights came out: {outcome.found}")
        return 0
    print(f"committed {outcome.expected}\nmade now  {outcome.found}")
    for name, (there, here) in outcome.differences.items():
        print(f"{name}: {there} there, {here} here")
    return 0 if outcome.differences else 1
