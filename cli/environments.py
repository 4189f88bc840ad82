"""environments: the tasks that a run can train on, and one of them in detail."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import yaml

from antiphon.cli.arguments import Json, columns
from antiphon.core.config import apply_override
from antiphon.core.config_sections import FILE

if TYPE_CHECKING:
    from antiphon.environments.registry import Description


def environments(task: str | None = None, /, *parameters: str, as_json: Json = False) -> None:
    """List the tasks that can be trained on, or show one.

    Of one: its parameters, a prompt and its answer, and the YAML to use it. Of file: rows and digests, a
    prompt as the model's chat template will get it, and what the right answer, an empty and a wrong one
    would earn; every row is checked.

    Args:
        task: the name of one, or package.module:Class for one of your own.
        parameters: key=value pairs of environment.parameters, such as train=my.jsonl.
        as_json: print one JSON document.
    """
    from antiphon.environments.registry import describe, describe_all, describe_file

    given: dict[str, Any] = {}
    for parameter in parameters:
        apply_override(given, parameter)
    if task == FILE:
        plain = describe_file(given)
        said = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=1 << 20)
        print(json.dumps(plain, indent=2) if as_json else said.rstrip())
        return
    if task is not None:
        one = describe(task, given)
        plain = asdict(one)
        print(json.dumps(plain, indent=2, default=str) if as_json else "\n".join(lines(one)))
        return
    found = describe_all()
    if as_json:
        print(json.dumps([{"name": name, "about": about} for name, about in found], indent=2))
        return
    print("\n".join(columns(found)))
    print(f"{len(found)} environments; `antiphon environments {found[0][0]}` shows one with a prompt")


def lines(found: "Description") -> list[str]:
    """Return what is said of an environment on a terminal."""
    said = [f"{found.name}: {found.about}".rstrip(": ")]
    if found.package:
        said.append(f"from {found.package}")
    said += ["", "parameters, with types and defaults:"]
    rows = [
        (name, f"{type(value).__name__:<5}", json.dumps(value, default=str))
        for name, value in found.parameters.items()
    ]
    said += [f"  {line}" for line in (columns(rows) if rows else ["none"])]
    said += ["", "a prompt:", *(f"  {line}" for line in found.prompt.splitlines())]
    said += ["", "its answer:", *(f"  {line}" for line in (found.answer or "(there are many)").splitlines())]
    if found.opening:
        said += ["", "its conversation begins:"]
        said += [f"  {one.role}: {line}" for one in found.opening for line in one.content.splitlines()]
        said += ["", "tools:"]
        told = [
            (f"{tool.name}({', '.join(tool.parameters['properties'])})", tool.description.partition("\n")[0])
            for tool in found.tools
        ]
        said += [f"  {line}" for line in (columns(told) if told else ["none"])]
    low, high = found.reward_range
    by = "conversation" if found.opening else "reward"
    scoring = [f"scoring: its own `{by}` gives each answer a number in {low:g}..{high:g}"]
    if found.name.startswith("reasoning/"):
        scoring = [
            "scoring: 1 when the text between <answer> and </answer> at the very end is right, else 0;",
            "  a model that does not write the tags by itself is told to by the parameter prompt_suffix",
        ]
    said += ["", *scoring, "", "to use it:"]
    tree: dict[str, Any] = {"environment": {"name": found.name}}
    simple = {name: value for name, value in found.parameters.items() if isinstance(value, int | float)}
    if simple:
        tree["environment"]["parameters"] = dict(list(simple.items())[:2])
    said += [f"  {line}" for line in yaml.safe_dump(tree, sort_keys=False).splitlines()]
    return [*said, f"or on the command line: environment.name={found.name}"]
