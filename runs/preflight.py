"""Preflight: everything about a run that can be found wrong before anything is started."""

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from antiphon.api.sink import SinkRun
from antiphon.core.algorithm import CROSS_ENTROPY, AlgorithmSection
from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError
from antiphon.core.messages import UNIT_RANGE, Reply, RewardRange
from antiphon.core.ranks.memory import check_memory, trained_parameters
from antiphon.core.seeds import conversation_seed, generator
from antiphon.cpu.compiler import check_compiler
from antiphon.environments.conversation import AnyEnvironment, ConversationEnvironment
from antiphon.environments.environment import Environment, Problem, reward_range_of
from antiphon.environments.file import FileEnvironment
from antiphon.environments.host import HostEnvironment
from antiphon.environments.outside import OutsideEnvironment, secret_values
from antiphon.environments.registry import environment_of
from antiphon.environments.scoring.messages import Failed, Turn, Verdict
from antiphon.lineage.export import check_adapter_base
from antiphon.lineage.layout import ledger_project
from antiphon.lineage.records import make_sinks
from antiphon.lineage.retention import disk_need, disk_words
from antiphon.lineage.store.remote_place import RemoteStore
from antiphon.models.adapters import start_folder
from antiphon.models.codec import TextCodec, check_reference, resolve_model_path
from antiphon.models.directory import (
    check_parts,
    check_pointers,
    count_parameters,
    end_tokens_by_file,
    expected_tensors,
    most_positions,
)
from antiphon.models.rendering import Renderer
from antiphon.net.rpc.serving import check_host
from antiphon.net.security.credentials import find_credentials, needed_token_key
from antiphon.runs.directory import make_home, make_usable
from antiphon.runs.fleet.launcher import check_bundles
from antiphon.runs.servers.prefect_server import check_port
from antiphon.runs.supervisor import devices_of
from antiphon.services.coordinator.prompts import prompts_of, renders_turns
from antiphon.services.coordinator.sealing import own_advantage
from antiphon.services.learner.asked_tensors import check_weights
from antiphon.services.reward.server import conversations_of, scorer_of
from antiphon.services.reward.service import Scorer
from antiphon.services.rollout.engine.environment import OVERRULING, device
from antiphon.system.free_space import free_bytes
from antiphon.system.memory import host_bytes
from antiphon.weights.transports.lattica import missing_reason
from antiphon.weights.transports.object_store import object_place

EVERYWHERE = frozenset({"0.0.0.0", "::", "[::]"})
"""Addresses to listen on that cannot be dialled."""
LONG_S = 20.0
"""Work before the start that takes longer is said."""
LARGE_BYTES = 1e9
"""Records that take more of the disk are said."""
SHARED_BYTES = 8 << 20
"""Free shared memory with which a run begins."""
CHECKED_PROMPTS = 256
"""Prompts of each split that are tokenised before anything starts; the coordinator checks them all."""
CONSTANTS = (
    *("", "0", "1", "-1", "0.5", "nan", "inf", "True", "False", "yes", "no", "None", "N/A"),
    *("a", "A", "()", "[]", "{}", "..."),
)
FORMS = ("{}", "<answer>{}</answer>")
"""How an answer may be written; which of them a task reads is not known here."""
PROBLEMS, FIRST, FEWEST = 64, 8, 16
"""Problems that a decoy is tried on, the first of them, after which only those that are paid go on, and the
fewest: with less, a right answer to one problem is paid for a large share of all."""
SOLUTIONS, MOST_BROKEN, NAMED = 1024, 0.1, 8
"""Reference solutions of each split that are judged by their own tests, the share that may fail, and how many
of these are named."""
MARGIN = 0.25
"""What luck may take from a decoy's share of the first problems."""
TRY_S = 120.0
"""Longest trial of an objective, the import of torch included."""
GIVE_UP_S = 20.0
"""A scorer that needs longer, such as a judge behind a network, is not tried any further."""

Score = Callable[[str, Sequence[str]], Awaitable[Sequence[Verdict]]]
"""Returns the verdict on each answer to the problem with a key, as a scoring pool does."""


def preflight(config: RunConfig, home: Path, results: Path | None = None) -> list[str]:
    """Check everything that can be checked without starting anything; then make `home` and `results`.

    Returns what is worth a note, in sentences.

    Raises:
        ConfigError: for a missing model, or one whose weights are not those that its configuration asks for
            or whose context is too short, a tokenizer that does not match, an unknown environment or one that
            breaks its contract, pays a constant or cannot be scored in the sandbox, impossible parameters,
            prompts too long for the engine, prompts that the tokenizer loses, an objective or advantage of
            the user's own that breaks its contract, an address that cannot be listened on, a remote or object
            store that refuses, what is no sink of records, or a folder that cannot be written.
        UnavailableError: when such a store does not answer.
        InfeasibleError: when this machine cannot hold what is trained and sampled from.
    """
    services = config.services
    credentials = find_credentials(services.credentials)
    if credentials is None:
        check_host(services.host)
    else:
        needed_token_key(credentials)
        if services.host in EVERYWHERE and services.address is None:
            raise ConfigError(
                f"services.host={services.host} listens everywhere but is dialled nowhere; set "
                "services.address to the name in the services' certificate by which workers reach it"
            )
    if services.coordinator_port:
        check_port(services.coordinator_port, "services.coordinator_port", services.host)
    check_bundles(config)
    if config.record.artifact_url is not None:
        RemoteStore(config.record.artifact_url, config.record.artifact_endpoint).check()
    make_sinks(config.record.sinks, SinkRun(config.run.name, home, config))
    if config.broadcast.object_store is not None:
        object_place(config.broadcast.object_store, config.broadcast.object_endpoint).check()
    if config.broadcast.lattica_port is not None and (reason := missing_reason()) is not None:
        raise ConfigError(f"broadcast.lattica_port={config.broadcast.lattica_port}: {reason}")
    model = Path(resolve_model_path(config.model.path))
    notes = [f"{name} is not used: the configuration decides" for name in OVERRULING if name in os.environ]
    check_shared_memory()
    compiled = {
        "rollout.compiled=true": config.rollout.compiled,
        "learner.compiled=true": config.learner.compiled,
        "sampling.sampler=native": config.sampling.sampler == "native",
    }
    for setting in (name for name, wanted in compiled.items() if wanted and device() == "cpu"):
        check_compiler(setting)
    if config.record.dvc and ledger_project(config.record, home) is None:
        dvc = shlex.join([str(Path(sys.executable).with_name("dvc")), "init", "--no-scm"])
        notes.append(
            f"{Path.cwd()} is in no DVC project, so this run keeps no ledger, and of its weights the best "
            f"and the newest; for later runs give this once in your project's folder: {dvc}"
        )
    if model.is_dir():
        check_pointers(model)
    check_methods(config.algorithm)
    if not config.reference.url:
        check_reference(config.model.path, config.reference.model)
        if config.reference.model and (teacher := Path(resolve_model_path(config.reference.model))).is_dir():
            _check_positions(config, "reference.model", teacher)
    environment: AnyEnvironment | None = None
    if config.client_driven:
        TextCodec.load(str(model))
    else:
        secret_values(config.environment.secrets)
        environment = environment_of(config.environment)
        renderer = Renderer.load(config, turns=renders_turns(environment))
    if model.is_dir():
        notes += check_model(config, model)
        notes += check_disk(config, model, home, free_bytes(home))
        if device() == "cpu":  # of GPUs it is not known what else they hold
            check_memory(config, expected_tensors(model), None, host_bytes(), gpus=False)
    if environment is not None:
        notes += check_task(config, environment, renderer)
    if results is not None:
        make_usable(results, "--results")
    make_home(home)
    return notes


def check_task(config: RunConfig, environment: AnyEnvironment, renderer: Renderer) -> list[str]:
    """Try out the environment of a run and its prompts; raises as `preflight`."""
    notes, section = list[str](), config.environment
    if isinstance(environment, OutsideEnvironment):
        environment.try_out()
    elif isinstance(environment, FileEnvironment):
        notes += environment.try_out()
    prompts = prompts_of(config, environment, renderer)
    sizes = {"train": section.train_size, "heldout": config.evaluation.prompts}
    places = [
        (split, index)
        for split, size in sizes.items()
        for index in looked_at(environment, split, size, CHECKED_PROMPTS)
    ]
    begun = time.perf_counter()
    for place in places:
        prompts.prompt(*place)
    each_s = (time.perf_counter() - begun) / len(places)
    notes += check_patience(config, each_s * sum(len(prompts.doubtful(*one)) for one in sizes.items()))
    if isinstance(environment, FileEnvironment):
        prompts.check_all(**sizes)
    texts = (environment.problem(*place) for place in places)
    check_characters(texts, renderer.codec, section.max_lost_share)
    if isinstance(environment, HostEnvironment):
        check_gateway(config)
    elif isinstance(environment, ConversationEnvironment):
        if config.reference.used:
            raise ConfigError(
                f"reference cannot act with environment.name={section.name}, which has turns; leave it out, "
                "or use an environment of one turn"
            )
        check_answering(config, environment)
    else:
        if config.reference.url:
            from antiphon.services.reward.prompt_logprobs import check_server  # brings an HTTP client along

            check_server(config, renderer.codec, environment.problem("train", 0).text)
        notes += check_scoring(config, environment)
        if isinstance(environment, FileEnvironment) and environment.runs_programs:
            notes += check_solutions(config, environment)
    return notes


def check_methods(algorithm: AlgorithmSection) -> None:
    """Try out an objective and an advantage of the user's own; the former in a process that has torch.

    Raises:
        ConfigError: when there is no such function, or it breaks its contract.
    """
    if algorithm.objective == CROSS_ENTROPY:
        raise ConfigError(
            f"algorithm.objective={CROSS_ENTROPY} learns from demonstrations, which a run has none of; use "
            "`antiphon sft`, or another objective"
        )
    if algorithm.advantage is not None:
        own_advantage(algorithm.advantage)
    if algorithm.own_objective:
        command = [sys.executable, "-P", "-m", "antiphon.services.learner.own_objective", algorithm.objective]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TRY_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"algorithm.objective={algorithm.objective} took more than {TRY_S:g} s for five sequences; "
                "make it faster"
            ) from error
        if done.returncode:
            raise ConfigError(
                (done.stderr.strip().splitlines() or ["algorithm.objective cannot be tried"])[-1]
            )


def check_gateway(config: RunConfig) -> None:
    """Check that hosts can be listened to, and that a command of theirs is there.

    Raises:
        ConfigError: when the address needs credentials, the port is taken, or there is no such program.
    """
    address, command = config.gateway.address, config.environment.host_command
    if config.services.credentials is None:
        check_host(address, "gateway.address")
    if config.gateway.port:
        check_port(config.gateway.port, "gateway.port", address)
    if command and shutil.which(command[0]) is None:
        raise ConfigError(
            f"environment.host_command begins with {command[0]!r}, which is no program here; install it, or "
            "give its path"
        )


def check_answering(config: RunConfig, environment: ConversationEnvironment) -> None:
    """Have a trial reply answered where the run will have it answered.

    Raises:
        ConfigError: when there is no sandbox, or the reply is not answered in it.
    """
    one = config.reward.model_copy(update={"processes": 1})
    trial, problem = config.model_copy(update={"reward": one}), environment.problem("train", 0)
    seed = conversation_seed(config.environment.seed, problem.key)

    async def tried() -> Turn:
        async with conversations_of(trial, environment) as conversations:
            return await conversations.answer("trial", problem.key, seed, [Reply(problem.answer)])

    if isinstance(said := asyncio.run(tried()), Failed):
        raise ConfigError(
            f"environment.name={config.environment.name}: a trial reply to {problem.key} was not answered "
            f"where the run answers ({said.reason}); change it, or see reward.sandbox"
        )


def looked_at(environment: AnyEnvironment, split: str, size: int, count: int) -> list[int]:
    """Return which of the first `size` problems of a split are looked at before a run, `count` at most.

    Those that are drawn are alike, so the first are taken. A file may be sorted, so one of its rows is drawn
    from each of `count` equal parts, by the environment's seed.
    """
    count = min(count, size)
    if not isinstance(environment, FileEnvironment):
        return list(range(count))
    bounds = np.linspace(0, size, count + 1).astype(np.int64)
    drawn = generator("looked-at", split, environment.seed).integers(bounds[:-1], bounds[1:])
    return [int(index) for index in drawn]


def check_scoring(config: RunConfig, environment: Environment) -> list[str]:
    """Score trial answers where the run will score them, and return what is worth a note.

    Raises:
        ConfigError: when there is no sandbox, an answer is not scored in it or by the judge, or one answer
            earns more than it may whatever is asked.
    """
    one = config.reward.model_copy(update={"processes": 1})
    scoring, section = scorer_of(config.model_copy(update={"reward": one}), environment), config.environment
    problems = [
        environment.problem("train", index)
        for index in looked_at(environment, "train", environment.size("train"), PROBLEMS)
    ]

    async def tried() -> tuple[str, float, bool]:
        async with scoring as scorer:
            trial = await scorer.score(problems[0].key, [problems[0].answer, ""])
            failed = [verdict for verdict in trial if isinstance(verdict, Failed)]
            if failed and config.judge.url:
                raise ConfigError(
                    f"judge.url={config.judge.url}: a trial answer to {problems[0].key} was not judged by "
                    f"judge.model={config.judge.model} ({failed[0].reason}); correct judge, or its server"
                )
            if config.judge.url:  # each decoy would cost a request
                return "", 0.0, True
            if failed:
                raise ConfigError(
                    f"environment.name={section.name}: a trial answer to {problems[0].key} was not scored "
                    f"where the run scores ({failed[0].reason}); there a class may start no thread and no "
                    "process, open no connection and write no file, and it reads only its own package, the "
                    "folders in PYTHONPATH and what is installed beside Antiphon; change it, or see "
                    "reward.sandbox"
                )
            within = reward_range_of(environment)
            return await best_decoy(scorer.score, problems, section.max_constant_share, within)

    decoy, share, pays_references = asyncio.run(tried())
    low, high = reward_range_of(environment)
    paid = f"{share:.2f}" + ("" if (low, high) == UNIT_RANGE else f" of the way from {low:g} to {high:g}")
    if share > section.max_constant_share and len(problems) >= FEWEST:
        raise ConfigError(
            f"environment.name={section.name} pays {paid} on average for the answer {decoy!r}, whatever "
            f"is asked, more than environment.max_constant_share={section.max_constant_share:g} allows: a "
            "policy would learn it alone; take another task or parameters, or raise that share, up to 1"
        )
    if pays_references:
        return []
    return [f"{section.name} has no reference answers that earn anything, so samples and reports show none"]


def check_solutions(config: RunConfig, environment: FileEnvironment) -> list[str]:
    """Judge the reference solutions of programs by their own tests, and return what is worth a note.

    Raises:
        ConfigError: when more than `MOST_BROKEN` of them fail.
    """
    places = [
        (split, index)
        for split, size in (("train", environment.size("train")), ("heldout", config.evaluation.prompts))
        for index in looked_at(environment, split, size, SOLUTIONS)
        if environment.problem(split, index).answer
    ]
    todo, broken = deque(places), list[tuple[str, int]]()

    async def judge(scorer: Scorer) -> None:
        while todo:
            place = todo.popleft()
            problem = environment.problem(*place)
            if await scorer.score(problem.key, [problem.answer]) != [1.0]:
                broken.append(place)

    async def judged() -> None:
        async with scorer_of(config, environment) as scorer, asyncio.TaskGroup() as judging:
            for _ in range(config.reward.processes):
                judging.create_task(judge(scorer))

    asyncio.run(judged())
    if not broken:
        return []
    named = ", ".join(environment.where(*place) for place in sorted(broken)[:NAMED])
    more = ", ..." if len(broken) > NAMED else ""
    said = f"{len(broken)} of {len(places)} reference solutions fail their own tests: {named}{more}"
    if len(broken) > MOST_BROKEN * len(places):
        raise ConfigError(
            f"environment.parameters.tests: {said}; more than {MOST_BROKEN:.0%}: take these rows out, "
            "or see whether the tests, the solutions (answer) and reward.answer_timeout_s are meant"
        )
    return [f"{said}; nothing can be learned from them"]


def check_patience(config: RunConfig, prompts_s: float) -> list[str]:
    """Check that all prompts, which the coordinator reads before it starts, take less than it may.

    Raises:
        ConfigError: when they take longer than a service may take to start.
    """
    said = (
        f"environment.train_size={config.environment.train_size}: making all prompts, as the coordinator "
        f"does before the start, takes about {prompts_s:,.0f} s here"
    )
    if prompts_s > config.services.start_timeout_s:
        raise ConfigError(
            f"{said}, more than services.start_timeout_s={config.services.start_timeout_s:g}; "
            "lower the former or raise the latter"
        )
    return [said] if prompts_s > LONG_S else []


def check_disk(config: RunConfig, model: Path, home: Path, free: int) -> list[str]:
    """Return what is said of the disk that a run's records need: nothing below `LARGE_BYTES` of plenty."""
    tokens = config.sampling.max_tokens / 2.0
    ledger = ledger_project(config.record, home) is not None
    trained = trained_parameters(config.learner, expected_tensors(model))
    need = disk_need(config, count_parameters(model), tokens, ledger=ledger, trained=trained)
    needed = sum(need.values())
    if needed < min(LARGE_BYTES, free / 2.0):
        return []
    said = f"{disk_words(need)}; {free / 1e9:,.1f} GB are free at {home}"
    return [said if needed < free else f"{said}: make room, or keep fewer weights (record.weights=last)"]


def check_shared_memory(folder: Path = Path("/dev/shm")) -> None:
    """Check that engines find room for their semaphores and queues.

    Raises:
        ConfigError: with its size, where there is too little.
    """
    if not folder.is_dir():
        return
    disk = os.statvfs(folder)
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    if free < SHARED_BYTES:
        raise ConfigError(
            f"{folder} has {free >> 10} KiB free of {total >> 10} KiB, and engines need "
            f"{SHARED_BYTES >> 20} MiB; make it larger (mount -o remount,size=64m {folder}, or docker's "
            "--shm-size=64m)"
        )


def check_model(config: RunConfig, model: Path) -> list[str]:
    """Check a model folder against its own configuration and the run's, and return what is worth a note.

    Raises:
        ConfigError: when a tensor is missing, superfluous or of another shape, the adapter to start from was
            made for another model, or the context is too short.
    """
    check_weights(model, config.learner)
    check_devices(config, model)
    start, notes = config.learner.lora.start, list[str]()
    if start is not None:
        notes += check_adapter_base(start_folder(start), model)
    _check_positions(config, "model.path", model)
    named = end_tokens_by_file(model)
    if len({frozenset(tokens) for tokens in named.values()}) > 1:
        said = ", ".join(f"{list(tokens)} in {name}" for name, tokens in named.items())
        notes.append(
            f"the files of model.path name different end tokens ({said}); each of them ends an answer"
        )
    return notes


def _check_positions(config: RunConfig, field: str, model: Path) -> None:
    wanted, positions = config.rollout.max_model_tokens, most_positions(model)
    if positions is not None and wanted > positions:
        raise ConfigError(
            f"rollout.max_model_tokens={wanted} is more than the {positions} positions of {field}={model} "
            f"(config.json); set rollout.max_model_tokens={positions} or less"
        )


def check_devices(config: RunConfig, model: Path) -> None:
    """Check that learner and engines of this machine have the devices that the configuration asks for.

    Raises:
        ConfigError: when the model's layers cannot be cut so, GPUs are given twice, are not there or are too
            few, or a setting needs one.
    """
    rollout = config.rollout
    check_parts(model, rollout.tensor_parallel)
    devices_of(config)
    asked = {"rollout.memory_share": rollout.memory_share, "rollout.graphs": rollout.graphs}
    for key, value in asked.items():
        if rollout.workers and device() == "cpu" and value not in (None, "none"):
            raise ConfigError(f"{key}={value} needs a GPU, and engines here run on the CPU; leave it out")


def check_characters(problems: Iterable[Problem], codec: TextCodec, limit: float) -> None:
    """Check that the model's tokenizer has tokens for what prompts say.

    `limit` is the largest share of their characters that may be lost, spaces left out.

    Raises:
        ConfigError: naming the share, and the first character that is lost with its prompt.
    """
    lost = total = 0
    first = ""
    for problem in problems:
        places = codec.lost_characters(problem.text)
        if places and not first:
            first = f"the first is {problem.text[places[0]]!r} in {problem.key}: {problem.text[:80]!r}"
        lost += len(places)
        total += sum(not character.isspace() for character in problem.text)
    if lost > limit * total:
        raise ConfigError(
            f"the tokenizer of model.path has no token for {lost / total:.1%} of the prompts' characters, "
            f"more than environment.max_lost_share={limit:g} allows; {first}; take another model or task, "
            "or raise that share, up to 1, to run without these characters"
        )


async def best_decoy(
    score: Score, problems: Sequence[Problem], limit: float, within: RewardRange = UNIT_RANGE
) -> tuple[str, float, bool]:
    """Return the decoy that is paid most for some problems, its mean reward, and whether any reference answer
    to its own problem is paid. Rewards count as shares of the way through the range `within`.

    A policy finds within steps an answer that is paid regardless of the question, and learns nothing else. So
    constants and right answers to other problems are handed in before a run. A task of yes and no pays half
    of them, which is fair. What is clearly paid less than `limit` for the first problems is not tried on the
    others, and what cannot be scored is paid nothing. Of a scorer that is too slow for the fewest problems
    nothing is known: it pays 0, and references.
    """
    tried, pays_references, (low, high) = 0, False, within
    answers = dict.fromkeys(problem.answer for problem in problems[:FIRST])
    paid = {form.format(text): 0.0 for text in (*CONSTANTS, *answers) for form in FORMS}
    try:
        async with asyncio.timeout(GIVE_UP_S):
            for problem in problems[:PROBLEMS]:
                likely = {text: sum_ for text, sum_ in paid.items() if sum_ >= (limit - MARGIN) * tried}
                if tried >= FIRST and not likely:
                    break
                paid = likely if tried >= FIRST else paid
                own = [form.format(problem.answer) for form in FORMS if problem.answer]
                for text, verdict in zip(paid, await score(problem.key, list(paid)), strict=True):
                    reward = 0.0 if isinstance(verdict, Failed) else (verdict - low) / (high - low)
                    paid[text] += reward
                    pays_references |= reward > 0.0 and text in own
                tried += 1
    except TimeoutError:
        if tried < FEWEST:
            return "", 0.0, True
    constant = max(paid, key=lambda text: paid[text])
    return constant, paid[constant] / max(1, tried), pays_references
