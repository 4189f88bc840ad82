"""The reward process of one run; it pulls its work, so all its server answers is the health check."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from antiphon.api import scorer as scorer_api
from antiphon.core.config import RunConfig
from antiphon.core.config_sections import FILE
from antiphon.core.errors import ConfigError
from antiphon.environments.conversation import AnyEnvironment, ConversationEnvironment
from antiphon.environments.environment import Environment, reward_range_of
from antiphon.environments.file import located
from antiphon.environments.host import HostEnvironment
from antiphon.environments.outside import folders_of, secret_values
from antiphon.environments.scoring.conversations import ConversationPool, InProcessConversations
from antiphon.environments.scoring.messages import ScoringTask
from antiphon.environments.scoring.pool import InProcess, ScoringPool
from antiphon.lineage.judgements import JUDGEMENTS_FILE
from antiphon.models.rendering import Renderer
from antiphon.net.rpc.serving import Security, start_server, stop_server
from antiphon.net.security.credentials import Credentials, needed_token_key
from antiphon.net.security.guard import Guard
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.reward.reference import ScorerClient
from antiphon.services.reward.service import Decoder, RewardService, Scorer
from antiphon.services.reward.turns import Answer, Hosting, TurnAnswerer
from antiphon.system.clock import wall_clock
from antiphon.system.packages import environment_facts, reference_of, scored_by
from antiphon.system.processes import StopRequest


def _configured(config: RunConfig) -> tuple[AnyEnvironment, Decoder]:
    # The library of tasks takes a second to load, so only the process that needs it loads it.
    from antiphon.environments.registry import environment_of
    from antiphon.models.codec import TextCodec, resolve_model_path

    return environment_of(config.environment), TextCodec.load(resolve_model_path(config.model.path))


def _task_of(config: RunConfig, environment: AnyEnvironment) -> ScoringTask:
    section, reward = config.environment, config.reward
    folders, readable = folders_of(scored_by(section))
    parameters = section.parameters
    if section.name == FILE:
        parameters, files = located(parameters)
        readable += files
    return ScoringTask(
        reference_of(section.name) or section.name,
        parameters,
        section.seed,
        section.train_size,
        section.heldout_size,
        reward.answer_timeout_s,
        reward.memory_mib << 20,
        folders=folders,
        readable=readable,
        secrets=secret_values(section.secrets),
        reward_range=reward_range_of(environment),
    )


def _options(config: RunConfig) -> dict[str, Any]:
    reward = config.reward
    return {
        "processes": reward.processes,
        "attempts": reward.attempts,
        "sandbox": reward.sandbox != "process",
        "patience_s": config.services.stall_timeout_s,
    }


def scorer_of(
    config: RunConfig, environment: Environment, run_dir: Path | None = None
) -> contextlib.AbstractAsyncContextManager[Scorer]:
    """Return what scores answers, as `judge` and `reward.sandbox` say; nothing starts before it is entered.

    Judgements of a model are kept in `run_dir`; without, as long as the context lasts.

    Raises:
        ConfigError: when a variable for secrets is not set.
    """
    if config.judge.url:
        from antiphon.services.reward.model_judge import ModelJudge  # brings an HTTP client along

        return ModelJudge(config.judge, environment, None if run_dir is None else run_dir / JUDGEMENTS_FILE)
    task = _task_of(config, environment)
    if environment.only_compares and config.reward.sandbox != "always":
        return contextlib.nullcontext(InProcess(environment, task.without_secrets))
    return ScoringPool(task, **_options(config))


def conversations_of(
    config: RunConfig, environment: ConversationEnvironment
) -> ConversationPool | InProcessConversations:
    """Return what answers replies, as `reward.sandbox` says; nothing is started before it is entered.

    Raises:
        ConfigError: when a model is to judge, which knows no turns.
    """
    if config.judge.url:
        raise ConfigError(
            f"judge.url has no effect with environment.name={config.environment.name}, which has turns; "
            "leave judge out, or use another environment"
        )
    task = _task_of(config, environment)
    if environment.only_compares and config.reward.sandbox != "always":
        limit_s = task.answer_timeout_s
        return InProcessConversations(environment, task.without_secrets, answer_timeout_s=limit_s)
    return ConversationPool(environment, task, **_options(config))


async def serve_reward(
    config: RunConfig,
    run_id: str,
    coordinator_address: str,
    host: str,
    port: int,
    ready: Callable[[int], None],
    reward_with: tuple[AnyEnvironment, Decoder] | None = None,
    credentials: Credentials | None = None,
    stop: StopRequest | None = None,
    run_dir: Path | None = None,
    scorer_address: str = "",
) -> None:
    """Reward the groups of one run until it is finished or the process is asked to stop.

    Port 0 picks a free one; `ready` is called with it. `reward_with` stands in for the environment and
    the decoder that `config` names. Without `credentials`, the services' bundle, it serves without
    encryption, on loopback alone. Where the run has a reference model its scorer is at
    `scorer_address`; without one, the server of reference.url is asked. Where hosts hold the environment they
    are served in the scorer's place, and `run_dir` keeps what is known of them, and a model's judgements.

    Raises:
        ConfigError: when the environment, the sandbox, the tokenizer or the port cannot be used, or the
            environment's files are not those that the run was opened with.
        ContractError: when the coordinator serves another run.
        UnavailableError: when the coordinator is away for longer than services.stall_timeout_s.
    """
    environment, codec = reward_with or _configured(config)
    facts = {} if reward_with else await asyncio.to_thread(environment_facts, config.environment)
    digest = facts.get("digest", "")
    coordinator = CoordinatorClient(coordinator_address, credentials=credentials)
    client_id = f"{socket.gethostname()}-{os.getpid()}"
    security = None
    if credentials is not None:
        clock = asyncio.get_running_loop().time
        security = Security(credentials, Guard(needed_token_key(credentials), run_id, wall_clock, clock))
    async with contextlib.AsyncExitStack() as running:
        scorer: Scorer | None = None
        answer: Answer | Hosting | None = None
        if isinstance(environment, HostEnvironment):
            from antiphon.models.codec import TextCodec
            from antiphon.services.reward.gateway import open_gateway  # brings an HTTP server along

            assert isinstance(codec, TextCodec) and run_dir is not None, "a run's own service"
            guard = None if security is None else security.guard
            opening = open_gateway(config, environment, codec, run_dir, guard)
            answer = await running.enter_async_context(opening)
        elif isinstance(environment, ConversationEnvironment):
            conversations = await running.enter_async_context(conversations_of(config, environment))
            renderer = await asyncio.to_thread(Renderer.load, config, turns=True)
            answer = TurnAnswerer(conversations, renderer, config.environment.seed)
        else:
            scorer = await running.enter_async_context(scorer_of(config, environment, run_dir))
        processes = config.reward.processes if isinstance(scorer, ScoringPool) else 1
        reference: scorer_api.Scorer | None = None
        if scorer_address:
            limit_s = config.services.stall_timeout_s
            client = ScorerClient(scorer_address, limit_s, credentials=credentials)
            reference = await running.enter_async_context(client)
        elif config.reference.used:
            from antiphon.services.reward.prompt_logprobs import AT_ONCE, ServedScorer  # an HTTP client

            reference = await running.enter_async_context(ServedScorer(config))
            processes = max(processes, AT_ONCE)
        service = RewardService(
            coordinator,
            scorer,
            codec,
            run_id,
            client_id,
            config.services.stall_timeout_s,
            at_once=config.judge.at_once if config.judge.url else processes,
            answer=answer,
            environment_digest=digest,
            reference=reference,
        )
        if stop is not None:
            stop.tell(service.stop)
        server, bound = await start_server(host, port, lambda server: None, ["antiphon.Reward"], security)
        try:
            await service.run(lambda: ready(bound))
        finally:
            await stop_server(server)
            await coordinator.close()
