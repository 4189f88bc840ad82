"""Model card: what an exported version says of itself, in the form that model hubs read."""

import json

import yaml

from antiphon.core.reporting.config_differences import flatten, set_by_hand
from antiphon.lineage.documents.replay_copy import ReplayCopy
from antiphon.models.codec import HUB_NAME

_HEAD = {
    "library_name": "transformers",
    "pipeline_tag": "text-generation",
    "tags": ["antiphon", "reinforcement-learning"],
}
_ALWAYS = (
    "run.seed",
    "run.steps",
    "loop.mode",
    "loop.max_staleness",
    "algorithm.objective",
    "learner.learning_rate",
)
_ELSEWHERE = ("run.name", "model.path", "environment.name", "record.", "services.", "coordinator.", "trust.")
"""Keys that the card says in other words, or that say where a run went and not how it learned."""
_CARD = """\
---
{head}---

# {run}, version {version}

A policy that Antiphon trained with reinforcement learning on `{task}`, starting from `{base}`.

| | |
|---|---|
| run | `{run}` |
| version | v{version}, after {version} of {steps} steps |
| held-out score | {score} |
| weights digest | `{digest}` (blake3 of names, types, shapes and values) |
| base model | `{base}`, weights `{base_digest}` |
| code | {code} |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained(".") for kind in (AutoModelForCausalLM, AutoTokenizer))
```

`vllm serve .` serves the same folder.

## Recipe
What differs from the defaults of the configuration, and the keys that matter most:

```yaml
{recipe}```

## Where it came from
{origin}
"""


def model_card(copy: ReplayCopy, version: int, score: str) -> str:
    """Return the card of a version as Markdown with a YAML head.

    Args:
        copy: the artifacts of its run.
        version: the version.
        score: how it did on held-out prompts.
    """
    config, base = copy.config, copy.config.model.path
    flat, changed = flatten(config), set_by_hand(config)
    recipe = {
        name: value
        for name, value in flat.items()
        if name in _ALWAYS or (name in changed and not name.startswith(_ELSEWHERE))
    }
    known_by_name = bool(HUB_NAME.fullmatch(base)) and not copy.base_files()
    head = {**({"base_model": base} if known_by_name else {}), **_HEAD}
    return _CARD.format(
        head=yaml.safe_dump(head, sort_keys=False),
        run=copy.run_id,
        version=version,
        steps=config.run.steps,
        task=config.environment.name,
        base=base,
        base_digest=copy.weights_digest(0),
        digest=copy.weights_digest(version),
        score=score,
        code=_code(copy),
        recipe="".join(f"{name}: {json.dumps(value)}\n" for name, value in recipe.items()),
        origin=_origin(copy.run_id, version),
    )


def _code(copy: ReplayCopy) -> str:
    release = copy.manifest.get("libraries", {}).get("antiphon", "")
    found = copy.manifest.get("code") or {}
    commit = f"commit `{found['revision']}`" if found else "installed without git"
    return f"antiphon {release}, {commit}{' with changes' if found.get('modified') else ''}"


def _origin(run_id: str, version: int) -> str:
    if version == 0:
        return "Version 0 is the base model as it was before the first step."
    return (
        "With the run's artifacts (its folder in the ledger, which `dvc pull` brings) the first command\n"
        "makes these weights again and compares every bit; the second one lists what they came from.\n\n"
        f"```sh\n./antiphon replay {run_id} --to {version - 1}\n./antiphon lineage {run_id} v{version}\n```"
    )
