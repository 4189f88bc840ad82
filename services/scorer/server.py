"""Scorer over gRPC, the answering side, and its process."""

import asyncio
from collections.abc import Callable
from typing import Any

from antiphon.api.scorer import Scorer
from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError
from antiphon.models.codec import check_reference
from antiphon.models.spared_libraries import spare_unused_libraries
from antiphon.net.rpc.calls import serve_contract
from antiphon.net.rpc.serving import Security, start_server, stop_server
from antiphon.net.security.credentials import Credentials, needed_token_key
from antiphon.net.security.guard import Guard
from antiphon.net.wire import SCORER, SCORER_CALLS
from antiphon.system.clock import wall_clock
from antiphon.system.processes import StopRequest

SERVICE_NAME = "antiphon.Scorer"
"""Full name of the service, for the health check."""


def register_scorer(server: Any, service: Scorer) -> None:
    """Add the service to a server that was not started yet."""
    serve_contract(server, SCORER, SCORER_CALLS, service)


def open_scorer(config: RunConfig) -> Scorer:
    """Load the reference model of a run and return what scores with it.

    Raises:
        ConfigError: when it has another vocabulary than the policy, cannot be loaded, or is served elsewhere.
    """
    if config.reference.url:
        raise ConfigError(
            "reference.url names the server that scores, so this service has nothing to do; leave "
            "reference.url out, or do not start it"
        )
    check_reference(config.model.path, config.reference.model)
    spare_unused_libraries()
    import torch  # only for who computes with it

    from antiphon.services.learner.policy import load_causal_model
    from antiphon.services.scorer.service import ScorerService

    torch.set_num_threads(config.reference.threads)
    dtype = torch.float32 if config.model.dtype == "float32" else torch.bfloat16
    model = load_causal_model(config.reference.model or config.model.path, dtype, False)
    model.requires_grad_(False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return ScorerService(model.to(device), config.sampling.temperature, config.model.head == "float32")


async def serve_scorer(
    config: RunConfig,
    run_id: str,
    host: str,
    port: int,
    ready: Callable[[int], None],
    open_service: Callable[[RunConfig], Scorer] = open_scorer,
    credentials: Credentials | None = None,
    stop: StopRequest | None = None,
) -> None:
    """Score tokens for one run until the process is asked to stop.

    Port 0 picks a free one; `ready` is called with it. Without `credentials`, the services' bundle, it serves
    without encryption, on loopback alone.

    Raises:
        ConfigError: when the model or the port cannot be used.
    """
    leave = asyncio.Event()
    if stop is not None:
        stop.tell(leave.set)
    service = await asyncio.to_thread(open_service, config)
    security = None
    if credentials is not None:
        guard = Guard(needed_token_key(credentials), run_id, wall_clock, asyncio.get_running_loop().time)
        security = Security(credentials, guard)
    server, bound = await start_server(
        host, port, lambda s: register_scorer(s, service), [SERVICE_NAME], security
    )
    try:
        ready(bound)
        await leave.wait()
    finally:
        await stop_server(server)
