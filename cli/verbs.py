"""Verbs: the one table of what can be typed: groups, places, usage, and an example of each.

Kept apart from the verbs themselves, so that `antiphon --help` imports none of them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path

PAGES = "docs/guides/README.md"
"""Where a reader goes on, in the source tree."""


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb as help shows it; what it does is said by its function's docstring."""

    usage: str
    """What follows the verb, in the words that its help explains."""
    examples: tuple[str, ...]
    """What follows the verb in command lines that would run."""
    place: str = ""
    """module:function within antiphon.cli, imported when the verb runs; by default both have its name."""


GROUPS: Mapping[str, Mapping[str, Verb]] = {
    "Start": {
        "demo": Verb("[OPTIONS] [OVERRIDES...]", ("", "run.steps=20 loop.max_staleness=0"), "run:demo"),
        "plan": Verb(
            "[OPTIONS] PATH [OVERRIDES...]",
            (
                "examples/plan/eight-billion.yaml --offers examples/plan/rented-gpus.yaml",
                "my.yaml loop.max_staleness=4 --run RUN --json",
                "my.yaml --memory --gpu H100",
            ),
        ),
        "tune": Verb("[OPTIONS] PATH [OVERRIDES...]", ("examples/quickstart.yaml", "my.yaml --alone --json")),
        "run": Verb(
            "[OPTIONS] PATH [OVERRIDES...]",
            ("examples/quickstart.yaml", "my.yaml run.seed=7 loop.mode=fixed"),
        ),
        "sft": Verb(
            "[OPTIONS] PATH [OVERRIDES...]", ("examples/sft/sums.yaml", "my.yaml data.epochs=2 --check")
        ),
        "config": Verb(
            "[OPTIONS] PATH [OVERRIDES...]", ("examples/quickstart.yaml loop.max_staleness=4",), "run:config"
        ),
        "environments": Verb(
            "[OPTIONS] [TASK] [PARAMETERS...]",
            ("", "reasoning/chain_sum", "file train=my.jsonl heldout=0.1 score=number"),
        ),
    },
    "Look": {
        "runs": Verb("[OPTIONS]", ("", "--json")),
        "status": Verb(
            "[OPTIONS] [RUN]", ("--watch", "RUN --json", "RUN --events --kind lease.expired --follow")
        ),
        "report": Verb("[OPTIONS] [RUNS...]", ("", "RUN --out page.html", "RUN1 RUN2 --json")),
        "evaluate": Verb(
            "[OPTIONS] [RUN] [VERSION]",
            ("", "RUN v12 --results scores.json", "RUN best --samples", "RUN --suite math --data FOLDER"),
        ),
        "browse": Verb("[OPTIONS] [RUN]", ("", "RUN --port 0", "copies/ledger/RUN")),
    },
    "Take away and check": {
        "export": Verb("RUN [VERSION] FOLDER", ("RUN best my-model", "RUN v12 my-model")),
        "lineage": Verb("[OPTIONS] [WORDS...]", ("RUN v12", "RUN --verify")),
        "replay": Verb("[OPTIONS] [RUN]", ("RUN", "RUN --from 50 --rollouts")),
        "keep": Verb("[OPTIONS] [RUN]", ("RUN", "RUN --records", "--remote")),
    },
    "Pages and services": {
        "up": Verb("[OPTIONS]", ("", "--s3", "--stop")),
        "deploy": Verb("[OPTIONS]", ("", "--schedules")),
        "door": Verb("[OPTIONS] PATH [OVERRIDES...]", ("my.yaml", "my.yaml door.models=2 --port 7790")),
        "serve": Verb("--config PATH [OPTIONS] SERVICE", ("coordinator --config my.yaml",)),
    },
    "Fleet": {
        "worker": Verb(
            "--coordinator HOST:PORT [OPTIONS]",
            ("--coordinator 10.0.0.5:7700 --name far-1 --credentials far-1",),
        ),
        "fleet": Verb(
            "[OPTIONS] ACTION [WHAT] [OVERRIDES...]",
            ("check my.yaml", "render my.yaml --out submitted", "list RUN", "stop RUN"),
        ),
        "invite": Verb(
            "[OPTIONS] [NAMES...]",
            (
                "gpu-7 --run RUN --host trainer.example",
                "--pool spot --count 8 --run RUN",
                "gpu-7 --revoke",
                "ada --scopes door",
            ),
        ),
    },
    "Maintenance": {
        "doctor": Verb("[OPTIONS]", ("", "--gpu --out gpu.json", "--fix")),
        "skip": Verb("--reason TEXT [OPTIONS] RUN STEP", ('RUN 12 --reason "the scorer was wrong"',)),
        "gc": Verb("[OPTIONS]", ("--dry-run", "--run RUN")),
        "simulate": Verb(
            "[OPTIONS] [SCENARIO] [OVERRIDES...]",
            ("--seeds 0..100", "--from-run quickstart-s0-1 loop.max_staleness=4"),
        ),
    },
}
"""Verbs by group, in the order in which they are listed."""

VERBS: Mapping[str, Verb] = {name: verb for verbs in GROUPS.values() for name, verb in verbs.items()}

REPLACED: Mapping[str, str] = {
    "certs": "invite WORKER --host HOST",
    "certs pool": "invite --pool NAME --count N",
    "compare": "report RUN1 RUN2",
    "down": "up --stop",
    "events": "status RUN --events",
    "push": "keep --remote",
    "record": "keep RUN --records",
    "samples": "evaluate RUN VERSION --samples",
    "token": "invite WORKER --run RUN",
    "token create": "invite NAME --scopes door",
    "token pardon": "invite NAME --pardon --run RUN",
    "token revoke": "invite NAME --revoke --run RUN",
    "token show": "invite --show BUNDLE",
    "void": "skip RUN STEP --reason TEXT",
}
"""What went -> the command that took its place."""


def place_of(name: str) -> tuple[str, str]:
    """Return the module of a verb within antiphon.cli, and its function."""
    module, _, function = (VERBS[name].place or f"{name}:{name}").partition(":")
    return module, function


def help_of(name: str) -> str:
    """Return what the docstring of a verb's function says before its arguments; nothing is imported."""
    module, function = place_of(name)
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    found = re.search(rf'^def {function}\(.*?"""(.*?)\s*(?:Args:|""")', source, re.DOTALL | re.MULTILINE)
    return "" if found is None else cleandoc(found[1])


def words_of(name: str) -> dict[str, str]:
    """Return what an `App` of the verb says besides its parameters: what it does, usage and examples."""
    examples = [f"{name} {example}".rstrip() for example in VERBS[name].examples]
    usage = f"Usage: antiphon {name} {VERBS[name].usage}"
    return {"help": help_of(name), "usage": usage, "help_epilogue": epilogue(examples)}


def epilogue(examples: Sequence[str]) -> str:
    """Return examples and where to read on, as Markdown."""
    lines = [f"- `antiphon {example}`" for example in examples]
    return "\n".join(["Examples:", "", *lines, "", f"More: {PAGES} in the source tree."])


def shown_default(value: object) -> str | None:
    """Return a default as help shows it; None for one that says nothing, such as an empty text.

    >>> [shown_default(value) for value in (0, 600.0, False, "", ())]
    ['0', '600', None, None, None]
    """
    if value is None or value is False or value == "" or value == ():
        return None
    return f"{value:g}" if isinstance(value, float) else str(value)
