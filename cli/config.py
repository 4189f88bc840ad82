"""config: print the tree that a configuration and its overrides resolve to."""

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def config(
    path: Path, /, *overrides: str, as_json: Annotated[bool, Parameter(name="--json")] = False
) -> None:
    """Print the resolved configuration with every default filled in; nothing is started.

    The environment's name and parameters are checked too. A learning rate that is not given is that of the
    model's size, or null where the model is not on this machine.

    A note on the error output names each key that was set and cannot act with the others.

    Args:
        path: the YAML file.
        overrides: key=value pairs, such as loop.max_staleness=4.
        as_json: print JSON instead of YAML.
    """
    from antiphon.core.config import dump_config, load_config

    resolved = load_config(path, list(overrides))
    from antiphon.environments.registry import make_environment  # slow to import

    chosen = resolved.environment
    make_environment(chosen.name, chosen.parameters, chosen.seed, chosen.train_size, chosen.heldout_size)
    if resolved.learner.learning_rate is None:
        from antiphon.models.learning_rate import with_learning_rate

        resolved = with_learning_rate(resolved)
        print("note: learner.learning_rate is chosen by the size of model.path", file=sys.stderr)
    for sentence in resolved.idle_keys():
        print(f"note: {sentence}", file=sys.stderr)
    if as_json:
        print(json.dumps(resolved.model_dump(mode="json"), indent=2))
    else:
        print(dump_config(resolved), end="")
