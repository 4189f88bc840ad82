"""evaluate: held-out scores of a run's versions, and what a version answers: the best, the worst, some."""

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from antiphon.cli.arguments import Json
from antiphon.core.errors import ConfigError
from antiphon.core.reporting.figures import interval, score_name
from antiphon.core.reporting.plain_text import plain
from antiphon.lineage.samples import Sample
from antiphon.runs.attach import held_out_scores, plain_scores, write_scores
from antiphon.runs.directory import home_directory
from antiphon.runs.finding import find_run
from antiphon.runs.samples import samples_of, version_of
from antiphon.system.files import write_atomically

_SPLITS = {"heldout": "held-out", "train": "training"}


def evaluate(
    run: str | None = None,
    /,
    version: str | None = None,
    *,
    samples: bool = False,
    number: Annotated[int, Parameter(name=("--number", "-n"))] = 2,
    split: Literal["train", "heldout"] | None = None,
    results: Path | None = None,
    timeout_s: float = 600.0,
    suite: str | None = None,
    data: Path | None = None,
    model: Path | None = None,
    k: int | None = None,
    temperature: float | None = None,
    limit: int | None = None,
    workers: int | None = None,
    share: float = 0.5,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative=())] = (),
    as_json: Json = False,
) -> None:
    """Print held-out scores of a run; with --samples what a version answers; with --suite scores on suites.

    A score that a running run has not measured yet is measured by its workers. With --samples completions are
    shown instead, with rewards and reasons: the best, the worst and random ones. A run that is going on shows
    what it has recorded so far.

    Args:
        run: the run's id; by default the newest.
        version: a policy version, such as v12, or best; by default every one that was evaluated, and with
            --samples the newest of which there are completions.
        samples: show completions of a version.
        number: with --samples: completions of each kind, of each split.
        split: with --samples: only completions of training groups, or only held-out answers.
        results: JSON file to write the scores to.
        timeout_s: longest wait for an evaluation, seconds.
        suite: names of suites (gsm8k, math500, humaneval, ..), of groups (math, code) or files, with commas
            between: sampled by workers of this machine, best version unless told otherwise. What was sampled
            before is taken from the cache.
        data: with --suite: folder of the suites' files; without, they come from the model hub.
        model: with --suite: folder of a Hugging Face model, in place of a run's version.
        k: with --suite: samples of each item.
        temperature: with --suite: divides the logits; 0 means greedy.
        limit: with --suite: only as many items from the beginning of each.
        workers: with --suite: how many sample; by default rollout.workers.
        share: with --suite, while the run goes on: workers at most, as a share of its own.
        set_: with --suite: key=value for the configuration (sampling.max_tokens=2048) or for the file's
            parameters (score=number); may be given several times.
        as_json: print one JSON list.
    """
    if run is not None and version is None and re.fullmatch(r"v\d+|best", run):
        run, version = None, run
    home = home_directory()
    if suite is not None:
        from antiphon.environments.suites import find_suites
        from antiphon.runs import suites  # its judges are slow to import

        for name, value in (("k", k), ("limit", limit), ("workers", workers)):
            if value is not None and value < 1:
                raise ConfigError(f"--{name} {value} must be at least 1")
        if not 0.0 < share <= 1.0:
            raise ConfigError(f"--share {share:g} must be above 0 and at most 1")
        if model is not None and (run or version):
            raise ConfigError(
                f"--model {model} is evaluated in place of a run's version; leave one of them out"
            )
        found = find_suites(suite, data)
        subject = suites.subject_of_model(model) if model else suites.subject_of_run(home, run, version)
        say = partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)
        say(f"{subject.name}, weights {subject.digest[:12]}")
        options = suites.SuiteOptions(k, temperature, limit, workers, share, set_)
        scored = suites.evaluate_suites(subject, found, options, home, say)
        plain_results = json.dumps([asdict(one) for one in scored], indent=2)
        if results is not None:
            write_atomically(results, plain_results.encode())
        print(plain_results if as_json else "\n".join(line for one in scored for line in one.lines()))
        return
    if data or model or k or temperature is not None or limit or workers or set_:
        raise ConfigError("--data, --model, --k, --temperature, --limit, --workers and --set need a --suite")
    if samples:
        return _show_samples(home, run, version, number, split, as_json)
    directory = find_run(home, run)
    run_id, scores = held_out_scores(home, directory.name, version_of(directory, version), timeout_s)
    if results is not None:
        write_scores(run_id, scores, results)
    if as_json:
        print(json.dumps(plain_scores(scores), indent=2))
        return
    for score in scores:
        by_chance = interval(score.reward_mean, score.prompts, score.reward_range)
        print(
            f"version {score.version}: held-out {score_name(score.reward_range)} {score.reward_mean:.4f} "
            f"± {by_chance:.4f} (95%) over {score.prompts} prompts"
        )
    if not scores:
        print("nothing was evaluated yet")


def _show_samples(
    home: Path, run: str | None, version: str | None, number: int, split: str | None, as_json: bool
) -> None:
    if number < 1:
        raise ConfigError(f"--number {number} must be at least 1")
    if run is not None and not (home / "runs" / run / "config.yaml").exists():
        directory = home / "runs" / run  # perhaps it was pulled: its ledger is looked for
    else:
        directory = find_run(home, run)
    found = samples_of(directory, home, version=version_of(directory, version), split=split, count=number)
    if as_json:
        print(json.dumps([asdict(sample) for sample in found], indent=2))
        return
    print(f"run {directory.name}, {f'version {found[0].version}' if found else 'nothing was recorded yet'}")
    print("\n".join(sample_lines(found)))


def sample_lines(found: Iterable[Sample]) -> Iterator[str]:
    """Spell completions for a terminal, three or more lines each."""
    for sample in found:
        use = "" if sample.split == "heldout" else ", trained on" if sample.trained else ", filtered"
        where = "" if sample.step is None else f", step {sample.step}"
        yield ""
        kept = f"{_SPLITS[sample.split]} {sample.kept_as}"
        yield plain(f"{kept}: reward {sample.reward:g}{use}{where} ({sample.key})")
        for name, text in (("prompt", sample.prompt), ("answer", sample.answer), ("reason", sample.reason)):
            if text or name != "reason":
                shown = plain(text, keep="\n\t")
                yield f"  {name}  {textwrap.indent(shown, ' ' * 10).strip() or '(empty)'}"
