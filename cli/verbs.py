"""Verbs: the one table of what can be typed: groups, places, help, usage, and an example of each.

Kept apart from the verbs themselves, so that `antiphon --help` imports none of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PAGES = "docs/guides/README.md"
"""Where a reader goes on, in the source tree."""


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb as help shows it."""

    help: str
    usage: str
    """What follows the verb, in the words that its help explains."""
    examples: tuple[str, ...]
    """What follows the verb in command lines that would run."""
    place: str = ""
    """module:function within antiphon.cli, imported when the verb runs; by default both have its name."""


GROUPS: Mapping[str, Mapping[str, Verb]] = {
    "Start": {
        "demo": Verb(
            "Train the shipped small model and show what came of it.",
            "[OPTIONS] [OVERRIDES...]",
            ("", "run.steps=20 loop.max_staleness=0"),
            "run:demo",
        ),
        "plan": Verb(
            "Say how many workers a configuration needs, and what a run takes and costs.",
            "[OPTIONS] PATH [OVERRIDES...]",
            (
                "examples/plan/eight-billion.yaml --offers examples/plan/rented-gpus.yaml",
                "my.yaml loop.max_staleness=4 --run RUN --json",
            ),
        ),
        "tune": Verb(
            "Find the fastest settings of the rollout engine on this machine.",
            "[OPTIONS] PATH [OVERRIDES...]",
            ("examples/quickstart.yaml", "my.yaml --alone --json"),
        ),
        "run": Verb(
            "Post-train a policy as a configuration says.",
            "[OPTIONS] PATH [OVERRIDES...]",
            ("examples/quickstart.yaml", "my.yaml run.seed=7 loop.mode=fixed"),
        ),
        "config": Verb(
            "Print the tree that a configuration resolves to.",
            "[OPTIONS] PATH [OVERRIDES...]",
            ("examples/quickstart.yaml loop.max_staleness=4",),
            "run:config",
        ),
        "environments": Verb(
            "List the tasks that can be trained on, or show one.",
            "[OPTIONS] [TASK]",
            ("", "reasoning/chain_sum"),
        ),
    },
    "Look": {
        "runs": Verb("List all runs, newest first.", "[OPTIONS]", ("", "--json")),
        "status": Verb(
            "Show a run as it is now; with --events, what happened to it.",
            "[OPTIONS] [RUN]",
            ("--watch", "RUN --json", "RUN --events --kind lease.expired --follow"),
        ),
        "report": Verb(
            "Write one self-contained HTML page about a run, or about several side by side.",
            "[OPTIONS] [RUNS...]",
            ("", "RUN --out page.html", "RUN1 RUN2 --json"),
        ),
        "evaluate": Verb(
            "Print the held-out scores of a run's versions; with --samples, what a version answers.",
            "[OPTIONS] [RUN] [VERSION]",
            ("", "RUN v12 --results scores.json", "RUN best --samples"),
        ),
    },
    "Take away and check": {
        "export": Verb(
            "Write a version of a run as a Hugging Face folder.",
            "RUN [VERSION] FOLDER",
            ("RUN best my-model", "RUN v12 my-model"),
        ),
        "lineage": Verb(
            "Show what an artifact came from, or check that all are as recorded.",
            "[OPTIONS] [WORDS...]",
            ("RUN v12", "RUN --verify"),
        ),
        "replay": Verb(
            "Execute recorded steps again and compare every bit.",
            "[OPTIONS] [RUN]",
            ("RUN", "RUN --from 50 --rollouts"),
        ),
        "keep": Verb(
            "Track a run's ledger with git and DVC; with --records or --remote, complete its records.",
            "[OPTIONS] [RUN]",
            ("RUN", "RUN --records", "--remote"),
        ),
    },
    "Pages and services": {
        "up": Verb(
            "Serve the pages of what was recorded and, with --s3, a bucket; --stop ends them.",
            "[OPTIONS]",
            ("", "--s3", "--stop"),
        ),
        "deploy": Verb(
            "Put the flows on a Prefect server, with forms and schedules.", "[OPTIONS]", ("", "--schedules")
        ),
        "serve": Verb(
            "Run one service in the foreground: coordinator, learner or reward.",
            "--config PATH [OPTIONS] SERVICE",
            ("coordinator --config my.yaml",),
        ),
    },
    "Fleet": {
        "worker": Verb(
            "Join a run from this machine and sample for it.",
            "--coordinator HOST:PORT [OPTIONS]",
            ("--coordinator 10.0.0.5:7700 --name far-1 --credentials far-1",),
        ),
        "invite": Verb(
            "Let workers elsewhere into a run: certificates and access tokens, and taking them back.",
            "[OPTIONS] [WORKERS...]",
            ("gpu-7 --run RUN --host trainer.example", "gpu-7 --revoke"),
        ),
    },
    "Maintenance": {
        "skip": Verb(
            "Train nothing in a step whose batch the learner cannot train on.",
            "--reason TEXT [OPTIONS] RUN STEP",
            ('RUN 12 --reason "the scorer was wrong"',),
        ),
        "gc": Verb("Remove artifacts that nothing needs any more.", "[OPTIONS]", ("--dry-run", "--run RUN")),
        "simulate": Verb(
            "Simulate whole runs with faults and check every event.",
            "[OPTIONS] [SCENARIO] [OVERRIDES...]",
            ("--seeds 0..100", "--from-run quickstart-s0-1 loop.max_staleness=4"),
        ),
    },
}
"""Verbs by group, in the order in which they are listed."""

VERBS: Mapping[str, Verb] = {name: verb for verbs in GROUPS.values() for name, verb in verbs.items()}

REPLACED: Mapping[str, str] = {
    "certs": "invite WORKER --host HOST",
    "compare": "report RUN1 RUN2",
    "down": "up --stop",
    "events": "status RUN --events",
    "push": "keep --remote",
    "record": "keep RUN --records",
    "samples": "evaluate RUN VERSION --samples",
    "token": "invite WORKER --run RUN",
    "token pardon": "invite NAME --pardon --run RUN",
    "token revoke": "invite NAME --revoke --run RUN",
    "token show": "invite --show BUNDLE",
    "void": "skip RUN STEP --reason TEXT",
}
"""What went -> the command that took its place."""


def words_of(name: str) -> dict[str, Any]:
    """Return what an `App` of the verb says besides its parameters: usage and examples."""
    verb = VERBS[name]
    examples = [f"{name} {example}".rstrip() for example in verb.examples]
    return {"usage": f"Usage: antiphon {name} {verb.usage}".rstrip(), "help_epilogue": epilogue(examples)}


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
