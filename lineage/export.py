"""Export: a policy version as a Hugging Face folder, which transformers and vLLM open as any other.

All of it comes from the run's ledger: the base model's configuration and tokenizer, the version's
weights, and what the card says. The weights are digested while they are copied, and nothing is left
where the digest is not the recorded one. The folder appears whole or not at all.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml

from antiphon.api.policy_file import copy_policy, tensors_of
from antiphon.core.digests import digest_bytes, digest_file
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.messages import UNIT_RANGE, RewardRange
from antiphon.core.reporting.config_differences import flatten, set_by_hand
from antiphon.core.reporting.figures import interval, range_of_line, score_name
from antiphon.lineage.documents.replay_copy import ReplayCopy
from antiphon.lineage.names import MODEL_FILES
from antiphon.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, DOWN, adapter_config
from antiphon.models.adapters import PREFIX as TENSORS
from antiphon.models.codec import HUB_NAME, local_model_directory
from antiphon.models.directory import weight_files
from antiphon.system.files import PREFIX, flush_tree, unusable
from antiphon.system.set_up import program_name

_T = TypeVar("_T")
WEIGHTS = "model.safetensors"
CARD = "README.md"
ADAPTER_BASE = "adapter_base.json"
"""Beside an adapter: digests of the files with the weights that it changes, which peft's own do not name."""
BEST = "best"
"""The version with the highest held-out score; of equal ones the first, as the champion is chosen."""


@dataclass(frozen=True, slots=True)
class Export:
    """A version that was written somewhere, and what is known of it."""

    run_id: str
    version: int
    weights_digest: str
    reward: float | None
    """Held-out score; None when it was not evaluated."""
    prompts: int
    """Held-out prompts it was scored on."""
    reward_range: RewardRange = UNIT_RANGE

    @property
    def score(self) -> str:
        """The held-out score in words, with what chance may add to it or take from it."""
        if self.reward is None:
            return "not evaluated"
        by_chance, name = (
            interval(self.reward, self.prompts, self.reward_range),
            score_name(self.reward_range),
        )
        return f"{self.reward:.4f} ± {by_chance:.4f} (95%), {name} on {self.prompts} held-out prompts"


def choose_version(copy: ReplayCopy, wanted: str) -> int:
    """Return the version that `wanted` names: v12, 12, or `best`.

    Raises:
        ConfigError: when it is none of these, its weights were not kept, or none was evaluated.
    """
    kept, others = copy.published(), copy.recorded_by_digest()
    published = [*kept, *others]
    known = f"the versions with weights are {', '.join(f'v{v}' for v in kept) or 'none'}"
    known += f"; those between, up to v{max(others)}, are made again" if others else ""
    if wanted == BEST:
        scored = [found for found in copy.evaluations() if found["version"] in published]
        if not scored:
            raise ConfigError(
                f"no version of run {copy.run_id} with weights was evaluated; name one: {known}"
            )
        return int(max(scored, key=lambda found: (found["reward_mean"], -found["version"]))["version"])
    digits = wanted.removeprefix("v")
    if not digits.isdecimal():
        raise ConfigError(f"{wanted!r} names no version; write v12 or best: {known}")
    if int(digits) not in published:
        raise ConfigError(f"run {copy.run_id} keeps no weights of version {digits}; {known}")
    return int(digits)


def export_version(
    copy: ReplayCopy, version: int, folder: Path, *, weights: Path | None = None, link: bool = False
) -> Export:
    """Write a version as a Hugging Face folder.

    Args:
        copy: the artifacts of its run.
        version: one of `copy.published()`, or any recorded one whose weights were made again.
        folder: is made, or is empty; it appears with everything in it.
        weights: the version's safetensors file, where the copy does not keep it.
        link: let the weights be the ledger's own file where the file system can, instead of a copy; for
            folders that nobody edits.

    Raises:
        ConfigError: when the folder is not empty, or the base model's files are not to be found.
        IntegrityError: when weights or files are not the recorded ones.
        UnavailableError: when the folder cannot be written.
    """
    return whole_folder(
        folder, lambda begun: _fill(begun, copy, version, weights or copy.weights(version), link), link
    )


def export_adapter(copy: ReplayCopy, version: int, adapter: Path, folder: Path) -> Export:
    """Write a version's adapter as a folder that peft opens.

    Args:
        copy: the artifacts of its run.
        version: that the adapter makes.
        adapter: its file, which was found to make that.
        folder: as for `export_version`, like the errors.
    """
    return whole_folder(folder, lambda begun: _fill_adapter(begun, copy, version, adapter))


def check_adapter_base(adapter: Path, model: Path) -> list[str]:
    """Check that an adapter was made for a model's own weights, and return a note where that is not known.

    Args:
        adapter: its folder, as `export_adapter` or peft writes it.
        model: folder of the model; weights in files of other names cannot be compared.

    Raises:
        ConfigError: when it was made for others, or does not say so in a form that can be read.
    """
    said = f"learner.lora.start={adapter}"
    try:
        made_for = dict(json.loads((adapter / ADAPTER_BASE).read_bytes()).get("files", {}))
    except FileNotFoundError:
        made_for = {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{said}: {ADAPTER_BASE} cannot be read ({error}); export the adapter again, or remove that file"
        ) from error
    files = weight_files(model)
    if not {path.name for path in files} <= made_for.keys():
        return [
            f"{said} does not say that it was made for the files of model.path={model}; its names and shapes "
            "are those of that model"
        ]
    for path in files:
        if (found := digest_file(path)) != made_for[path.name]:
            raise ConfigError(
                f"{said} was made for a {path.name} with digest {str(made_for[path.name])[:12]}, but that of "
                f"model.path={model} has {found[:12]}; give the model that it was trained on"
            )
    return []


def whole_folder(folder: Path, fill: Callable[[Path], _T], link: bool = False) -> _T:
    """Let a folder be filled under another name, and give it its own; return what `fill` does.

    Raises:
        ConfigError: when it is not empty.
        UnavailableError: when it cannot be written; nothing is left then.
    """
    check_place(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            begun = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder.parent))
            undo.callback(shutil.rmtree, begun, ignore_errors=True)
            made = fill(begun)
            for path in () if link else (begun, *begun.iterdir()):  # it is made to be handed on
                path.chmod(0o755 if path.is_dir() else 0o644)
            flush_tree(begun)
            os.replace(begun, folder)
    except OSError as error:
        raise unusable(error, folder.parent) from error
    return made


def check_place(folder: Path) -> None:
    """Check that an export may be written to a folder.

    Raises:
        ConfigError: when there is something in it.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; name a folder that does not exist yet")


def _fill(folder: Path, copy: ReplayCopy, version: int, source: Path | None, link: bool) -> Export:
    if source is None:
        raise ConfigError(f"run {copy.run_id} keeps no weights of version {version}")
    export = _described(copy, version)
    for name, body in _model_files(copy).items():
        (folder / name).write_bytes(body)
    if link and _linked(source, folder / WEIGHTS):
        found = copy_policy(source)
    else:
        with (folder / WEIGHTS).open("wb") as target:
            found = copy_policy(source, target.write)
    if found != export.weights_digest:
        raise IntegrityError(
            f"{source} holds weights {found[:12]}, but version {version} of {copy.run_id} was recorded with "
            f"{export.weights_digest[:12]}; remove the file, then `dvc checkout` or `dvc pull` brings it back"
        )
    (folder / CARD).write_text(_card(copy, export, _HEAD, _LOAD), encoding="utf-8")
    return export


def _described(copy: ReplayCopy, version: int) -> Export:
    scored = {found["version"]: found for found in copy.evaluations()}
    score = scored.get(version, {})
    reward = float(score["reward_mean"]) if score else None
    prompts, within = int(score.get("prompts", 0)), range_of_line(score)
    return Export(copy.run_id, version, copy.weights_digest(version), reward, prompts, within)


def _fill_adapter(folder: Path, copy: ReplayCopy, version: int, source: Path) -> Export:
    export = _described(copy, version)
    (folder / ADAPTER_WEIGHTS).write_bytes(source.read_bytes())
    lora, base = copy.config.learner.lora, copy.config.model.path
    load = _LOAD_ADAPTER
    if lora.start is not None:
        base, load = f"{copy.run_id}-v0", _STARTED + _LOAD_ADAPTER
    modules = [
        entry.name.removeprefix(TENSORS).removesuffix(DOWN)
        for entry in tensors_of(source)
        if entry.name.endswith(DOWN)
    ]
    (folder / ADAPTER_CONFIG).write_bytes(adapter_config(lora, base, modules))
    of_run = copy.base_files() if lora.start is None else {}  # else its base is no model of its own
    files = {name: digest for name, digest in of_run.items() if name.endswith(".safetensors")}
    (folder / ADAPTER_BASE).write_text(json.dumps({"files": files}) + "\n")
    head = _HEAD | {"library_name": "peft"}
    load = load.format(run=copy.run_id, base=base)
    (folder / CARD).write_text(_card(copy, export, head, load), encoding="utf-8")
    return export


def _model_files(copy: ReplayCopy) -> dict[str, bytes]:
    """Return the base model's configuration and tokenizer files, as they were when the run began.

    config.json has the dtype of the weights, so that loading them rounds nothing.
    """
    recorded = copy.base_files()
    wanted = [name for name in MODEL_FILES if not recorded or name in recorded]
    needed = [name for name in wanted if name in recorded] or ["config.json"]
    places = [copy.model]
    if not all((copy.model / name).is_file() for name in needed):
        places.append(local_model_directory(copy.config.model.path))
    found = {}
    for name in wanted:
        path = next((place / name for place in places if (place / name).is_file()), None)
        if path is not None:
            found[name] = path.read_bytes()
            if name in recorded and digest_bytes(found[name]) != recorded[name]:
                raise IntegrityError(f"{path} is not the file that run {copy.run_id} began with; restore it")
        elif name in recorded:
            raise ConfigError(f"{name} of the base model is neither in {places[0]} nor in {places[-1]}")
    tree, dtype = json.loads(found.get("config.json", b"{}")), copy.config.model.dtype
    old = [name for name in ("dtype", "torch_dtype") if name in tree] or ["dtype"]
    if tree and any(tree.get(name) != dtype for name in old):
        found["config.json"] = (json.dumps(tree | dict.fromkeys(old, dtype), indent=2) + "\n").encode()
    return found


def _linked(source: Path, target: Path) -> bool:
    try:
        target.hardlink_to(source.resolve())
    except OSError:
        return False  # another file system, or one without links: a copy does as well
    return True


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

{load}
## Recipe
What differs from the defaults of the configuration, and the keys that matter most:

```yaml
{recipe}```

## Where it came from
{origin}
"""
_LOAD = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained(".") for kind in (AutoModelForCausalLM, AutoTokenizer))
```

`vllm serve .` serves the same folder.
"""
_STARTED = (
    "The base of this adapter is version 0 of the run: `antiphon export {run} v0 {base}` writes it.\n\n"
)
_LOAD_ADAPTER = """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), ".")
```

`vllm serve {base} --enable-lora --lora-modules policy=.` serves it. The digest is that of the merged weights.
"""
_BASE = "Version 0 is the base model as it was before the first step."
_MADE = """\
With the run's artifacts (its folder in the ledger, which `dvc pull` brings) the first command
makes these weights again and compares every bit; the second one lists what they came from.

```sh
{antiphon} replay {run} --to {last}
{antiphon} lineage {run} v{version}
```"""


def _card(copy: ReplayCopy, export: Export, head: Mapping[str, object], load: str) -> str:
    """Return the card of a version as Markdown with a YAML head; `load` says how it is opened."""
    config, base, version = copy.config, copy.config.model.path, export.version
    changed = set_by_hand(config)
    recipe = {
        name: value
        for name, value in flatten(config).items()
        if name in _ALWAYS or (name in changed and not name.startswith(_ELSEWHERE))
    }
    known_by_name = bool(HUB_NAME.fullmatch(base)) and not copy.base_files()
    head = {**({"base_model": base} if known_by_name else {}), **head}
    code, release = copy.manifest.get("code") or {}, copy.manifest.get("libraries", {}).get("antiphon", "")
    commit = f"commit `{code['revision']}`" if code else "installed without git"
    return _CARD.format(
        head=yaml.safe_dump(head, sort_keys=False),
        load=load,
        run=copy.run_id,
        version=version,
        steps=config.run.steps,
        task=config.environment.name,
        base=base,
        base_digest=copy.weights_digest(0),
        digest=export.weights_digest,
        score=export.score,
        code=f"antiphon {release}, {commit}{' with changes' if code.get('modified') else ''}",
        recipe="".join(f"{name}: {json.dumps(value)}\n" for name, value in recipe.items()),
        origin=(_MADE if version else _BASE).format(
            antiphon=program_name(), run=copy.run_id, version=version, last=version - 1
        ),
    )
