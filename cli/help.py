"""Help: how the verbs are grouped, in which words they are used, and an example of each.

Kept apart from the verbs, so that `antiphon --help` imports none of them.
"""

from collections.abc import Sequence
from typing import Any

PAGES = "docs/guides/README.md"
"""Where a reader goes on, in the source tree."""

GROUPS: dict[str, tuple[str, ...]] = {
    "Start": ("demo", "plan", "tune", "run", "config", "environments"),
    "Look": ("runs", "status", "report", "compare", "samples", "evaluate", "events"),
    "Take away and check": ("export", "lineage", "replay", "keep", "push"),
    "Pages and services": ("up", "down", "deploy", "serve"),
    "Fleet": ("worker", "certs", "token"),
    "Maintenance": ("record", "void", "gc", "simulate"),
}
"""Verbs in the order in which they are listed."""

_WORDS: dict[str, tuple[str, ...]] = {
    "demo": ("[OPTIONS] [OVERRIDES...]", "demo", "demo run.steps=20 loop.max_staleness=0"),
    "run": (
        "[OPTIONS] PATH [OVERRIDES...]",
        "run examples/quickstart.yaml",
        "run my.yaml run.seed=7 loop.mode=fixed",
    ),
    "config": ("[OPTIONS] PATH [OVERRIDES...]", "config examples/quickstart.yaml loop.max_staleness=4"),
    "plan": (
        "[OPTIONS] PATH [OVERRIDES...]",
        "plan examples/plan/eight-billion.yaml --offers examples/plan/rented-gpus.yaml",
        "plan my.yaml loop.max_staleness=4 --run RUN --json",
    ),
    "tune": ("[OPTIONS] PATH [OVERRIDES...]", "tune examples/quickstart.yaml", "tune my.yaml --alone --json"),
    "environments": ("[OPTIONS] [TASK]", "environments", "environments reasoning/chain_sum"),
    "runs": ("[OPTIONS]", "runs", "runs --json"),
    "status": ("[OPTIONS] [RUN]", "status --watch", "status RUN --json"),
    "report": ("[OPTIONS] [RUN]", "report", "report RUN --out page.html"),
    "compare": ("[OPTIONS] FIRST SECOND [MORE...]", "compare RUN1 RUN2", "compare RUN1 RUN2 RUN3 --json"),
    "samples": ("[OPTIONS] [RUN] [VERSION]", "samples", "samples RUN v12"),
    "evaluate": ("[OPTIONS] [RUN]", "evaluate", "evaluate RUN --version 12 --results scores.json"),
    "events": ("[OPTIONS] [RUN]", "events --last 20", "events RUN --kind lease.expired --follow"),
    "export": ("RUN [VERSION] FOLDER", "export RUN best my-model", "export RUN v12 my-model"),
    "lineage": ("[OPTIONS] [WORDS...]", "lineage RUN v12", "lineage RUN --verify"),
    "replay": ("[OPTIONS] [RUN]", "replay RUN", "replay RUN --from 50 --rollouts"),
    "keep": ("[RUN]", "keep RUN"),
    "push": ("[OPTIONS]", "push"),
    "up": ("[OPTIONS]", "up", "up --s3"),
    "down": ("", "down"),
    "deploy": ("[OPTIONS]", "deploy", "deploy --schedules"),
    "serve": ("COMMAND", "serve coordinator --config my.yaml"),
    "worker": (
        "--coordinator HOST:PORT [OPTIONS]",
        "worker --coordinator 10.0.0.5:7700 --name far-1 --credentials far-1",
    ),
    "certs": ("[OPTIONS]", "certs --host trainer.example --worker gpu-7"),
    "token": ("COMMAND", "token create --worker gpu-7 --run RUN"),
    "record": ("[OPTIONS] [RUN]", "record RUN"),
    "void": ("--reason TEXT [OPTIONS] RUN STEP", 'void RUN 12 --reason "the scorer was wrong"'),
    "gc": ("[OPTIONS]", "gc --dry-run", "gc --run RUN"),
    "simulate": (
        "[OPTIONS] [SCENARIO] [OVERRIDES...]",
        "simulate --seeds 0..100",
        "simulate --from-run quickstart-s0-1 loop.max_staleness=4",
    ),
}
"""Verb -> what follows it, in the words that its help explains, and examples."""


def place_of(verb: str) -> tuple[str, int]:
    """Return a verb's group and its place in the list of all verbs."""
    order = [(group, name) for group, names in GROUPS.items() for name in names]
    place = next(place for place, (_, name) in enumerate(order) if name == verb)
    return order[place][0], place


def words_of(verb: str) -> dict[str, Any]:
    """Return what an `App` of the verb says besides its parameters: usage and examples."""
    tail, *examples = _WORDS[verb]
    return {"usage": f"Usage: antiphon {verb} {tail}".rstrip(), "help_epilogue": epilogue(examples)}


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
