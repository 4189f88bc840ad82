"""Suites: sets of problems by which models are compared, as file environments that nothing is trained on.

`SUITES` says of each which file it is in, under which keys, what judges its answers, and how it is sampled by
default. Files are looked for in a folder by name, `NAME.jsonl.gz` or another suffix that rows may have; some
are on the model hub too. A file of another name is a suite with the defaults of `Suite`.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.system.rows import SUFFIXES

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
"""What prompts of mathematics end with in the reports that models are published with."""


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite: its file, and how it is sampled unless told otherwise."""

    name: str
    file: str
    """Name of the file, without suffix."""
    samples: int = 1
    """Of each item: small suites need many."""
    temperature: float = 0.0
    """Greedy where there is one sample."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """What differs from `PARAMETERS` among `environment.parameters`."""
    hub: str = ""
    """As `hub:NAME` in `environment.parameters`; "" where only files are known."""
    hub_keys: Mapping[str, Any] = field(default_factory=dict)
    """What differs there."""


PARAMETERS: Mapping[str, Any] = {
    "question": "problem",
    "answer": "answer",
    "id": "id",
    "score": "math",
    "prompt_suffix": BOXED,
}
_MANY: Mapping[str, Any] = {"samples": 16, "temperature": 0.6}
_QA = {"question": "question", "id": None}
_CODE = {
    "question": "prompt",
    "answer": "canonical_solution",
    "id": "task_id",
    "score": "programs",
    "prompt_suffix": "",
}
_MATH = (
    Suite("gsm8k", "gsm8k_test", hub="hub:openai/gsm8k:main:test", hub_keys=_QA),
    Suite("math500", "math500", hub="hub:HuggingFaceH4/MATH-500:test", hub_keys={"id": "unique_id"}),
    Suite("aime2024", "aime2024", **_MANY, hub="hub:HuggingFaceH4/aime_2024:train"),
    Suite("aime2025", "aime2025", **_MANY),
    Suite("amc12", "amc12_2022_2023", **_MANY),
    Suite("amc23", "amc23", **_MANY),
    Suite("olympiadbench", "olympiadbench_oe_maths_en"),
    Suite("omnimath", "omni_math_rule", hub="hub:KbsdJames/Omni-MATH:test", hub_keys={"id": None}),
    Suite("minerva", "minerva"),
)
_PROGRAMS = (
    Suite("humaneval", "humaneval", keys={**_CODE, "tests": "test"}, hub="hub:openai/openai_humaneval:test"),
    Suite("humaneval+", "humaneval_plus", keys={**_CODE, "tests": "plus_input"}),
    Suite("mbpp", "mbpp", keys={**_CODE, "answer": "code", "tests": "tests"}),
    Suite("mbpp+", "mbpp_plus", keys={**_CODE, "tests": "plus_input"}),
)
SUITES: Mapping[str, Suite] = {suite.name: suite for suite in (*_MATH, *_PROGRAMS)}
GROUPS: Mapping[str, Sequence[Suite]] = {"math": _MATH, "code": _PROGRAMS}
"""Names of several suites at once."""


def find_suites(named: str, data: Path | None) -> list[tuple[Suite, dict[str, Any]]]:
    """Return the suites that a person names, each with the `environment.parameters` of its file.

    Args:
        named: a suite, a group of them, or a file; several with commas between.
        data: folder of the files; None: from the hub, where a suite is there.

    Raises:
        ConfigError: for an unknown name, naming the closest, or a file that is missing. Of a group those that
            are missing are left out, as long as one is there.
    """
    found: list[tuple[Suite, dict[str, Any]]] = []
    known = {**{name: (suite,) for name, suite in SUITES.items()}, **GROUPS}
    for name in (part.strip() for part in named.split(",")):
        if name in known:
            there = [(suite, place) for suite in known[name] if (place := _place(suite, data))]
            if not there:
                raise ConfigError(_missing(known[name][0], data))
        elif suffix := next((end for end in SUFFIXES if name.endswith(end)), ""):
            path = Path(name).expanduser()
            if not path.is_file():
                raise ConfigError(f"--suite {name}: there is no such file; give its path")
            stem = path.name.removesuffix(suffix)
            suite = next((one for one in SUITES.values() if one.file == stem), Suite(stem, stem))
            there = [(suite, str(path.resolve()))]
        else:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]}?" if close else f"they are {', '.join(known)}"
            raise ConfigError(
                f"--suite {name!r} is unknown; {hint} A file of your own ends in {' or '.join(SUFFIXES)}"
            )
        for suite, place in there:
            keys = {**PARAMETERS, **suite.keys, **(suite.hub_keys if place == suite.hub else {})}
            # Both splits are one file: only the held-out one is asked for.
            found.append((suite, {**keys, "train": place, "heldout": place}))
    return found


def _place(suite: Suite, data: Path | None) -> str:
    if data is None:
        return suite.hub
    paths = (data.expanduser() / f"{suite.file}{suffix}" for suffix in SUFFIXES)
    return next((str(path.resolve()) for path in paths if path.is_file()), "")


def _missing(suite: Suite, data: Path | None) -> str:
    if data is None:
        return (
            f"--suite {suite.name} is looked for on no hub; give the folder of {suite.file}.jsonl as --data"
        )
    names = " or ".join(f"{suite.file}{suffix}" for suffix in SUFFIXES)
    return f"--suite {suite.name}: {data} has none of {names}; give the folder that has it as --data"
