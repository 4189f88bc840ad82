"""Suites: a version, or any model's folder, is sampled on suites by workers of its own, judged and scored.

What was sampled stays in the cache of the home (`lineage.suite_cache`): a call that is repeated after a kill
goes on where it was, and one that was finished samples nothing. Answers are judged where a run judges them.
"""

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from antiphon.api.policy_file import copy_policy
from antiphon.core.config import RunConfig, apply_override, build_config
from antiphon.core.config_sections import FILE
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.core.reporting.suite_scores import Estimate, ItemSamples, suite_scores
from antiphon.core.sampling_config import decide_rule
from antiphon.core.seeds import derive_seed
from antiphon.environments.contamination import Contamination, contamination
from antiphon.environments.file import FileEnvironment
from antiphon.environments.registry import environment_of, with_sizes
from antiphon.environments.scoring.messages import Failed
from antiphon.environments.suites import Suite
from antiphon.lineage.export import WEIGHTS, choose_version, export_version
from antiphon.lineage.run_overview import is_running
from antiphon.lineage.suite_cache import SuiteCache
from antiphon.lineage.tracking.suite_records import log_suite
from antiphon.models.codec import decoder
from antiphon.models.rendering import Renderer
from antiphon.runs.finding import find_artifacts
from antiphon.runs.preflight import check_characters, check_model
from antiphon.services.coordinator.prompts import prompts_of
from antiphon.services.reward.server import scorer_of
from antiphon.services.rollout.engine.environment import child_environment, device
from antiphon.services.rollout.suite_worker import SuiteRequest, write_work
from antiphon.system.clock import wall_clock
from antiphon.system.collecting import LOADING
from antiphon.system.files import hold
from antiphon.system.packages import digest_of, environment_facts
from antiphon.system.processes import ChildProcess, stop_groups

SEVERAL_TEMPERATURE = 0.6
"""Of several samples, where a suite's own is 0 and none is given: greedy ones would be the same."""
MOST_FAILED = 0.05
"""Share of answers that may be such that no reward could be given; they count as wrong."""
QUIET_S = 3600.0
"""Longest time in which no sample becomes whole; then a worker hangs."""
POLL_S, STOP_S = 1.0, 5.0
"""Seconds between two looks at workers, and between SIGTERM and SIGKILL where one failed."""
_SECTIONS = ("model", "sampling", "rollout", "drafting", "reward")
"""What a suite takes over from a run: how it samples and judges, and nothing of how it learns."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated."""

    name: str
    config: RunConfig
    folder: Path
    """A Hugging Face folder with its weights."""
    digest: str
    """Of the weights."""
    run_dir: Path | None = None
    """Of the run that it is a version of."""
    version: int | None = None


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """How suites are sampled; None is what a suite says itself."""

    samples: int | None = None
    temperature: float | None = None
    limit: int | None = None
    """Items from a suite's beginning; None: all."""
    workers: int | None = None
    share: float = 0.5
    """Workers at most, while the run goes on, as a share of `rollout.workers`; one may always be."""
    seed: int = 0
    overrides: Sequence[str] = ()
    """`section.field=value` for the configuration, `field=value` for the parameters of the file."""


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """A suite's scores, and where they came from."""

    suite: str
    file: str
    items: int
    samples: int
    """Of each item."""
    sampled: int
    """By this call."""
    cached: int
    failed: int
    """Answers to which no reward could be given."""
    cut: int
    """Answers that sampling.max_tokens cut off."""
    temperature: float
    scores: Mapping[str, Estimate]
    contaminated: Contamination | None
    """With the run's training file, where it trains on one that is here."""


SampleAll = Callable[[RunConfig, Path, Sequence[SuiteRequest], int], None]
"""Draws samples into the cache at a path, with this many workers."""


def subject_of_run(home: Path, run: str | None, version: str) -> Subject:
    """Return a version of a run, whose weights are laid out beside the cache.

    Raises:
        ConfigError: when there is no such run or version, or only its digest was kept.
    """
    artifacts, _ = find_artifacts(home, run, None)
    chosen = choose_version(artifacts, version)
    if artifacts.weights(chosen) is None:
        said = f"`antiphon export {artifacts.run_id} v{chosen} FOLDER` makes them again, then --model FOLDER"
        raise ConfigError(
            f"run {artifacts.run_id} kept no weights of version {chosen}; {said} evaluates them"
        )
    digest = artifacts.weights_digest(chosen)
    folder = home / "suites" / "models" / f"{artifacts.run_id}-v{chosen}-{digest[:12]}"
    if not folder.exists():
        export_version(artifacts, chosen, folder, link=True)
    run_dir = home / "runs" / artifacts.run_id
    name = f"{artifacts.run_id} v{chosen}"
    return Subject(name, artifacts.config, folder, digest, run_dir if run_dir.is_dir() else None, chosen)


def subject_of_model(folder: Path) -> Subject:
    """Return the model in a folder, under the default configuration.

    Raises:
        ConfigError: when the folder has no weights.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"--model {folder} has no *.safetensors; give the folder of a Hugging Face model")
    one = weights == [folder / WEIGHTS]
    digest = copy_policy(weights[0]) if one else digest_of(weights)
    return Subject(str(folder), build_config({}), folder.resolve(), digest)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A suite whose prompts are known and whose file was read."""

    suite: Suite
    config: RunConfig
    environment: FileEnvironment
    key: str
    items: int
    missing: list[SuiteRequest]
    cached: int

    @property
    def each(self) -> int:
        return self.config.evaluation.samples

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self.config.environment.parameters


def evaluate_suites(
    subject: Subject,
    suites: Sequence[tuple[Suite, Mapping[str, Any]]],
    options: SuiteOptions,
    home: Path,
    say: Callable[[str], None] = print,
    sample: SampleAll | None = None,
) -> list[SuiteResult]:
    """Sample what the cache does not have, judge and score; nothing is sampled before all files were read.

    Args:
        subject: what is evaluated.
        suites: as `find_suites` returns them.
        options: how.
        home: holds the cache.
        say: hears what is done.
        sample: draws the samples; by default workers of this machine.

    Raises:
        ConfigError: when a file, an option or the model cannot be used, or another call evaluates here.
        AntiphonError: when a worker failed, or too many answers could not be judged.
    """
    folder = home / "suites"
    if (lock := hold(folder / "lock")) is None:
        raise ConfigError(f"another evaluation of suites uses {folder}; wait for it, or stop it first")
    database = folder / "samples.sqlite"
    with lock, SuiteCache(database) as cache:
        prepared = [_prepare(subject, *suite, options, cache, say) for suite in suites]
        missing = (request for one in prepared for request in one.missing)
        # Two files may be the same.
        requests = [*{(one.key, one.item, one.sample): one for one in missing}.values()]
        workers = min(_workers(subject, options), len(requests))
        if requests:
            cached = sum(one.cached for one in prepared)
            say(f"{len(requests)} answers to sample with {workers} workers, {cached} are in the cache")
            (sample or sample_with_workers)(prepared[0].config, database, requests, workers)
        return [_scored(subject, one, cache, options.seed, say) for one in prepared]


def sample_with_workers(
    config: RunConfig, database: Path, requests: Sequence[SuiteRequest], workers: int
) -> None:
    """Share requests out over workers of this machine, and wait for them; they end with this process.

    Raises:
        AntiphonError: when one failed, with its last words, or they hang; the others are stopped.
    """
    with SuiteCache(database) as cache, tempfile.TemporaryDirectory(prefix="antiphon-suites-") as folder:
        children: list[ChildProcess] = []
        try:
            for number in range(workers):
                path = Path(folder) / f"{number}.json"
                write_work(path, config, database, requests[number::workers])
                words = [*LOADING, "antiphon.services.rollout.suite_worker", str(path)]
                log, environment = path.with_suffix(".log"), child_environment(config.rollout.threads)
                children.append(ChildProcess(words, log, environment))
            waiting, count, came = [*children], cache.count(), time.monotonic()
            while waiting:
                with contextlib.suppress(TimeoutExpired):
                    waiting[0].wait(POLL_S)
                if bad := next((child for child in children if child.poll() not in (None, 0)), None):
                    raise AntiphonError(f"a worker failed: {bad.last_words()}; what was sampled is kept")
                if (now := cache.count()) > count:
                    count, came = now, time.monotonic()
                if time.monotonic() - came > QUIET_S:
                    raise AntiphonError(f"no sample came in {QUIET_S:g} s; lower sampling.max_tokens")
                waiting = [child for child in waiting if child.alive()]
        finally:
            stop_groups(children, STOP_S)


def _workers(subject: Subject, options: SuiteOptions) -> int:
    fleet = subject.config.rollout.workers
    wanted = max(1, fleet) if options.workers is None else options.workers
    if subject.run_dir is not None and is_running(subject.run_dir):
        return min(wanted, max(1, int(options.share * fleet)))
    return wanted


def _prepare(
    subject: Subject,
    suite: Suite,
    parameters: Mapping[str, Any],
    options: SuiteOptions,
    cache: SuiteCache,
    say: Callable[[str], None],
) -> _Prepared:
    config = with_sizes(_config_of(subject, suite, parameters, options))
    section, environment = config.environment, environment_of(config.environment)
    assert isinstance(environment, FileEnvironment)
    check_model(config, subject.folder)
    items = min(environment.size("heldout"), options.limit or environment.size("heldout"))
    prompts = prompts_of(config, environment, renderer := Renderer.load(config))
    problems = [environment.problem("heldout", item) for item in range(items)]
    check_characters(problems, renderer.codec, section.max_lost_share)
    sampling = config.evaluation.parameters(config.sampling)
    file, digest = str(section.parameters["heldout"]), environment_facts(section)["heldout"]
    rule = decide_rule(config.sampling.rule, device())
    prompted = ("question", "prompt_prefix", "prompt_suffix")
    decisive = {
        "weights": subject.digest,
        "tokenizer": digest_of([*subject.folder.glob("tokenizer*.json")]),
        "file": digest,
        "prompt": {name: section.parameters.get(name) for name in prompted},
        "model": config.model.model_dump(mode="json", exclude={"path"}),
        "system_prompt": section.system_prompt,
        "sampling": {**asdict(sampling), "sampler": config.sampling.sampler, "rule": rule},
        "seed": options.seed,
    }
    key = digest_bytes(json.dumps(decisive, sort_keys=True).encode())
    before = cache.register(key, file, digest, decisive)
    known = cache.places(key)
    missing = [
        SuiteRequest(
            key,
            item,
            number,
            prompts.prompt("heldout", item).token_ids,
            derive_seed("suite", options.seed, item, number),
            sampling,
        )
        for item in range(items)
        for number in range(config.evaluation.samples)
        if (item, number) not in known
    ]
    if before is not None:
        say(
            f"{suite.name}: {file} has changed since it was evaluated last ({before[:12]} before, "
            f"{digest[:12]} now): answers to the old one do not count"
        )
    cached = items * config.evaluation.samples - len(missing)
    return _Prepared(suite, config, environment, key, items, missing, cached)


def _config_of(
    subject: Subject, suite: Suite, parameters: Mapping[str, Any], options: SuiteOptions
) -> RunConfig:
    """Return the configuration whose held-out prompts are the suite."""
    run = subject.config.model_dump(mode="json")
    samples = suite.samples if options.samples is None else options.samples
    temperature = options.temperature
    if temperature is None:
        temperature = suite.temperature or (SEVERAL_TEMPERATURE if samples > 1 else 0.0)
    if samples > 1 and not temperature:
        raise ConfigError(f"--k {samples} at temperature 0 gives equal samples; give --temperature, or --k 1")
    section = {name: run["environment"][name] for name in ("system_prompt", "max_lost_share")}
    tree: dict[str, Any] = {name: run[name] for name in _SECTIONS}
    tree["rollout"]["swap_cache"] = "recompute"  # nothing is swapped
    tree |= {
        "environment": {**section, "name": FILE, "parameters": dict(parameters)},
        "loop": {"mode": run["loop"]["mode"], "group_size": run["loop"]["group_size"], "prompts_per_step": 1},
        "evaluation": {**run["evaluation"], "prompts": 1, "samples": samples, "temperature": temperature},
    }
    tree["loop"]["accept_uneven"] = run["loop"]["accept_uneven"]
    for override in options.overrides:
        dotted = "." in override.partition("=")[0]
        apply_override(tree if dotted else tree["environment"]["parameters"], override)
    tree["model"]["path"] = str(subject.folder)
    return build_config(tree)


def _scored(
    subject: Subject, one: _Prepared, cache: SuiteCache, seed: int, say: Callable[[str], None]
) -> SuiteResult:
    samples = [
        sample for sample in cache.samples(one.key) if sample.item < one.items and sample.sample < one.each
    ]
    decode = decoder(str(subject.folder))
    texts = {(sample.item, sample.sample): decode(sample.tokens) for sample in samples}
    rewards, failed = asyncio.run(_judged(one, texts))
    if len(failed) > MOST_FAILED * len(texts):
        place, reason = next(iter(failed.items()))
        raise AntiphonError(
            f"{one.suite.name}: {len(failed)} of {len(texts)} answers could not be judged, more than "
            f"{MOST_FAILED:.0%}, such as that to {one.environment.where('heldout', place[0])}: {reason}"
        )
    rows = [_item(one, item, texts, rewards) for item in range(one.items)]
    scores = suite_scores([row for _, row in rows], seed)
    name, found = str(one.parameters["heldout"]), _contaminated(subject, one, say)
    if subject.run_dir is not None and subject.version is not None:
        records = [record for record, _ in rows]
        log_suite(subject.run_dir, one.suite.name, subject.version, scores, records, wall_clock())
    return SuiteResult(
        one.suite.name,
        name,
        one.items,
        one.each,
        len(one.missing),
        one.cached,
        len(failed),
        sum(sample.finish == "length" for sample in samples),
        one.config.evaluation.temperature or 0.0,
        scores,
        found,
    )


async def _judged(
    one: _Prepared, texts: Mapping[tuple[int, int], str]
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], str]]:
    """Return the rewards of answers, and why others got none."""
    rewards: dict[tuple[int, int], float] = {}
    failed: dict[tuple[int, int], str] = {}
    room = asyncio.Semaphore(2 * one.config.reward.processes)

    async def item(index: int) -> None:
        places = [(index, number) for number in range(one.each)]
        async with room:
            key = one.environment.problem("heldout", index).key
            verdicts = await scorer.score(key, [texts[place] for place in places])
        for place, verdict in zip(places, verdicts, strict=True):
            if isinstance(verdict, Failed):
                failed[place] = verdict.reason
            else:
                rewards[place] = verdict

    async with scorer_of(one.config, one.environment) as scorer:
        await asyncio.gather(*(item(index) for index in range(one.items)))
    return rewards, failed


def _item(
    one: _Prepared, item: int, texts: Mapping[tuple[int, int], str], rewards: Mapping[tuple[int, int], float]
) -> tuple[dict[str, Any], ItemSamples]:
    problem, places = one.environment.problem("heldout", item), [(item, i) for i in range(one.each)]
    given = tuple(rewards.get(place, 0.0) for place in places)
    answers = one.environment.answers_in([texts[place] for place in places])
    record = {
        "key": problem.key,
        "prompt": problem.text,
        "reference": problem.answer,
        "rewards": json.dumps(given),
        "answers": json.dumps(answers),
        "completion": texts[item, 0],
    }
    return record, ItemSamples(given, answers)


def _contaminated(subject: Subject, one: _Prepared, say: Callable[[str], None]) -> Contamination | None:
    """Compare a suite with the file that the run trains on; None where there is none here."""
    section = subject.config.environment
    if section.name != FILE or subject.run_dir is None:
        return None
    try:
        trained = environment_of(section)
    except ConfigError as error:  # its file is on another machine
        say(f"{one.suite.name}: not compared with what the run trains on: {error}")
        return None
    assert isinstance(trained, FileEnvironment)
    rows = (trained.question("train", index) for index in range(trained.size("train")))
    return contamination((one.environment.question("heldout", item) for item in range(one.items)), rows)
