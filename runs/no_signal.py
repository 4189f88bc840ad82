"""No signal: what a run says in the end that trained nothing at all, with completions that show why."""

from collections.abc import Sequence
from pathlib import Path

from antiphon.core.errors import AntiphonError
from antiphon.core.records import StepCommit
from antiphon.core.reporting.alarms import ALARMS, no_signal_words, untrained
from antiphon.runs.samples import samples_of

SHOWN = 3
"""Completions shown."""
LONGEST = 100
"""Characters of a prompt or an answer in a line; `antiphon samples` has all."""


def closing_lines(commits: Sequence[StepCommit], run_dir: Path, home: Path) -> list[str]:
    """Return what the end of a run says when none of its steps trained anything; nothing when one did.

    First a sentence with the fix, then a few completions of the newest version that has any.
    """
    why = untrained(commits)
    if not commits or not all(why):
        return []
    fix = next(kind.fix for kind in ALARMS if kind.name == "no_signal")
    said = [f"no_signal: this run taught nothing; {no_signal_words(commits, why)}; {fix}"]
    try:
        found = samples_of(run_dir, home, count=1)[:SHOWN]
    except AntiphonError as error:
        return [*said, f"its completions cannot be shown: {error}"]
    for sample in found:
        reason = f" ({sample.reason})" if sample.reason else ""
        said.append(f"  reward {sample.reward:g}: {_short(sample.prompt)} -> {_short(sample.answer)}{reason}")
    return [*said, f"more of them: ./antiphon samples {run_dir.name}"] if found else said


def _short(text: str) -> str:
    plain = repr(" ".join(text.split()))
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST // 2]} ... {plain[-LONGEST // 2 :]}"
