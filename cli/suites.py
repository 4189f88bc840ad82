"""suites: what `antiphon evaluate --suite` does and prints."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from antiphon.core.errors import ConfigError
from antiphon.environments.contamination import WORDS
from antiphon.environments.suites import find_suites
from antiphon.lineage.export import BEST
from antiphon.runs.suites import (
    SuiteOptions,
    SuiteResult,
    evaluate_suites,
    subject_of_model,
    subject_of_run,
)


def print_suites(
    home: Path,
    run: str | None,
    version: str | None,
    named: str,
    data: Path | None,
    model: Path | None,
    options: SuiteOptions,
    as_json: bool,
) -> None:
    """Evaluate a version, or the model in a folder, on the suites that are named, and print the scores.

    Raises:
        ConfigError: when an option, a suite or the version is none.
    """
    for name, value in (("k", options.samples), ("limit", options.limit), ("workers", options.workers)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value} must be at least 1")
    if not 0.0 < options.share <= 1.0:
        raise ConfigError(f"--share {options.share:g} must be above 0 and at most 1")
    if model is not None and (run or version):
        raise ConfigError(f"--model {model} is evaluated in place of a run's version; leave one of them out")
    found = find_suites(named, data)
    subject = subject_of_run(home, run, version or BEST) if model is None else subject_of_model(model)

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    say(f"{subject.name}, weights {subject.digest[:12]}")
    results = evaluate_suites(subject, found, options, home, say)
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    for result in () if as_json else results:
        print("\n".join(suite_lines(result)))


def suite_lines(result: SuiteResult) -> Iterator[str]:
    """Spell a suite's scores for a terminal."""
    scores = (
        f"{name} {one.mean:.4f} ({one.low:.4f} to {one.high:.4f})" for name, one in result.scores.items()
    )
    yield f"{result.suite}: {', '.join(scores)}, 95% over {result.items} items"
    cut = f", {result.cut} cut off by sampling.max_tokens" if result.cut else ""
    failed = f", {result.failed} could not be judged" if result.failed else ""
    yield (
        f"  {result.sampled} answers sampled at temperature {result.temperature:g}, {result.cached} from the "
        f"cache{cut}{failed}"
    )
    if (found := result.contaminated) is not None:
        first = min({**found.overlapping, **found.same}.items(), default=None)
        such = "" if first is None else f", such as item {first[0] + 1} with training row {first[1] + 1}"
        yield (
            f"  {len(found.same)} items are training prompts of the run, and {len(found.overlapping)} share "
            f"{WORDS} words in a row with one{such}"
        )
