"""Environments of verifiers 0.4: its own client renders, and asks the gateway for tokens.

Seats are the trainable agents in the order in which the environment's configuration declares them. Agents
that would use verifiers' chat loop (`null`) or its shell (`bash`), which start a process for each turn, use a
chat loop within this process at a hundredth of the cost; other harnesses are kept.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from verifiers.v1.configs.agent import agent_config_fields, resolve_agent
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment

from antiphon_env_host.gateway import Gateway, HostError, LimitError, RefusedError
from antiphon_env_host.hosting import Episode, Program, Seat, Tasks

__all__ = ["ChatLoop"]
HARNESS = "antiphon_chat_loop"
PROCESS_HARNESSES = {"null", "bash"}
KEY_VARIABLE = "ANTIPHON_TOKEN"
"""Where verifiers' client finds the bearer token."""


class VerifiersV1(Program):
    """A taskset of verifiers with its environment.

    Args:
        name: id of the taskset: the module that has it.
        arguments: fields of the environment's configuration, such as {"taskset": {"difficulty": 2}}.
        renderer: configuration of the package renderers; it must keep old tokens.
        tokenizer: folder of the model's tokenizer.

    Raises:
        HostError: when there is no such environment or tokenizer, or it does not take the arguments.
    """

    def __init__(
        self,
        gateway: Gateway,
        name: str,
        arguments: Mapping[str, Any],
        renderer: Mapping[str, Any],
        tokenizer: str | None,
    ) -> None:
        self.name = f"verifiers:{name}"
        if tokenizer is None or not Path(tokenizer).is_dir():
            raise HostError(
                f"--tokenizer={tokenizer} is no folder; name the model's, with whose tokens to render"
            )
        os.environ[KEY_VARIABLE] = gateway.token
        sys.modules[HARNESS] = sys.modules[__name__]
        ChatLoop.patience_s = gateway.patience_s
        try:
            self._env = load_environment(self._config(name, arguments))
            self._client = vf.TrainClientConfig(
                base_url=f"{gateway.url}/v1",
                api_key_var=KEY_VARIABLE,
                renderer=renderer,
                renderer_model_name=tokenizer,
            )
        except Exception as error:  # a module that is not there, or anything that it raises
            raise HostError(f"verifiers cannot load {name}: {error}") from error
        self._agents: list[str] = []
        self._tasks: Tasks[Any] = Tasks(self._env.taskset)

    def _config(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the environment's configuration, with its agents on this machine."""
        kind = env_config_type(name, arguments.get("id", ""))
        data = {**arguments, "taskset": {"id": name, **arguments.get("taskset", {})}}
        for agent, spec in agent_config_fields(kind()).items():
            own = {"runtime": {"type": "subprocess"}, **arguments.get(agent, {})}
            meant = spec.harness.id if spec.harness else default_harness_id(name)
            if meant in PROCESS_HARNESSES:
                own.setdefault("harness", {"id": HARNESS})
            data[agent] = own
        return kind.model_validate(data)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Hold the environment's servers, and learn from its `setup` which agents train."""

        def make(_: str, spec: Any) -> Any:
            return vf.make_agent(resolve_agent(spec, model="policy", client=self._client))

        async with self._env.serving():
            agents = vf.Agents(self._env.config, make)
            await self._env.setup(agents)
            for name, spec in agent_config_fields(self._env.config).items():
                if spec.client is None and not getattr(agents, name).trainable:
                    raise HostError(
                        f"agent {name} of {self.name} does not train and has no model; give it one: "
                        f'--args \'{{"{name}": {{"model": ..., "client": ...}}}}\''
                    )
                if spec.client is None:
                    self._agents.append(name)
            yield

    async def play(self, episode: Episode) -> Sequence[Seat]:
        """Play one episode."""
        if len(episode.trajectories) != len(self._agents):
            raise HostError(
                f"environment.seats is {len(episode.trajectories)}, but {self.name} has "
                f"{len(self._agents)} agents that train ({', '.join(self._agents)}); set it to that"
            )
        names = dict(zip(self._agents, episode.trajectories, strict=True))

        def begun(trace: Any) -> None:
            if trace.agent.name in names:
                trace.agent.config.sampling.antiphon_trajectory = names[trace.agent.name]

        (slot,) = self._env.slots(self._tasks.pick(episode.split, episode.index))
        context = vf.ModelContext(episode.model, self._client, vf.SamplingConfig(**episode.sampling))
        done = await self._env.run_slot(slot, context, asyncio.Semaphore(1), on_trace=begun)
        return [self._seat(done, name) for name in self._agents]

    def _seat(self, episode: Any, agent: str) -> Seat:
        """Read off what an agent earned."""
        traces = [trace for trace in episode.traces if trace.agent.name == agent]
        errors = [error for trace in episode.traces for error in trace.errors] + list(episode.errors)
        seat = Seat(branches=[branch.token_ids for trace in traces for branch in trace.branches])
        if not episode.ok:
            seat.error = next((f"{e.type}: {e.message}" for e in errors), "environment: it did not end well")
        elif len(traces) != 1:
            seat.error = f"environment: agent {agent} ran {len(traces)} times in an episode, not once"
        else:
            seat.reward = traces[0].reward
        return seat


class ChatLoopConfig(HarnessConfig):
    """Nothing to set."""


class ChatLoop(Harness[ChatLoopConfig]):
    """Sends the conversation to the model until it calls no tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    patience_s = 300.0

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        """Run one segment of the conversation."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        # verifiers passes the gateway's outages on, so its server is asked again as the gateway would be.
        model = Gateway(endpoint, secret, self.patience_s)
        async with AsyncExitStack() as stack:
            tools = Tools()
            for server, url in mcp_urls.items():
                await tools.connect(stack, server, url)
            body = {"model": ctx.model, "messages": messages} | (
                {"tools": tools.specs} if tools.specs else {}
            )
            while True:
                try:  # the episode has the deadline: a request that is repeated here would be a second turn
                    answer = await model.post("/chat/completions", body, timeout_s=None)
                except LimitError:
                    return ProgramResult(0, "", "")
                except (RefusedError, HostError) as error:
                    return ProgramResult(1, "", str(error))
                message = answer["choices"][0]["message"]
                messages.append({name: value for name, value in message.items() if value is not None})
                if not (calls := message.get("tool_calls")):
                    return ProgramResult(0, "", "")
                for call in calls:
                    said = await tools.call(call["function"]["name"], call["function"]["arguments"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})


class Tools:
    """The tools of a task's servers, as the model calls them."""

    def __init__(self) -> None:
        self.specs: list[dict[str, Any]] = []
        self._of: dict[str, tuple[ClientSession, str]] = {}

    async def connect(self, stack: AsyncExitStack, server: str, url: str) -> None:
        """Take in the tools of one server."""
        streams = await stack.enter_async_context(streamable_http_client(url))
        session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
        await session.initialize()
        for tool in (await session.list_tools()).tools:
            name = f"{server}_{tool.name}" if server else tool.name
            self._of[name] = session, tool.name
            parameters = getattr(tool, "inputSchema", None) or getattr(tool, "input_schema", {})
            function = {"name": name, "description": tool.description or "", "parameters": parameters}
            self.specs.append({"type": "function", "function": function})

    async def call(self, name: str, arguments: str) -> str:
        """Return what a tool says; of a call that cannot be made, why."""
        if name not in self._of:
            return f"error: there is no tool {name}; there are {', '.join(self._of)}"
        try:
            given = json.loads(arguments or "{}")
        except ValueError as error:
            return f"error: the arguments are no JSON: {error}"
        session, own = self._of[name]
        result = await session.call_tool(own, given)
        return "".join(getattr(part, "text", "") for part in result.content)
