"""Environments of verifiers before 0.2: messages to the gateway's chat completions, which renders them."""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.types import ClientConfig

from antiphon_env_host.gateway import CALL_S, LONGEST_PAUSE_S, Gateway, HostError, limit_in
from antiphon_env_host.hosting import Episode, Program, Seat, Tasks

KEY_VARIABLE = "ANTIPHON_TOKEN"


class Client(OpenAIChatCompletionsClient):
    """verifiers' client, but an empty message is an answer too: a policy that learns may give one."""

    async def raise_from_native_response(self, response: Any) -> None:
        """Find fault only with what is no answer."""
        message = response.choices[0].message
        if message.content or message.tool_calls:
            await super().raise_from_native_response(response)
        else:
            message.content = ""


class VerifiersV0(Program):
    """An environment as `load_environment` of a module gives it; it has one seat.

    Args:
        name: the module.
        arguments: of `load_environment`.

    Raises:
        HostError: when there is no such environment.
    """

    def __init__(self, gateway: Gateway, name: str, arguments: Mapping[str, Any]) -> None:
        self.name = f"verifiers:{name}"
        os.environ[KEY_VARIABLE] = gateway.token
        try:
            self._env = import_module(name.rpartition("/")[2].replace("-", "_")).load_environment(**arguments)
            own = self._env.build_eval_dataset()
            self._train = Tasks(self._env.get_dataset())
        except Exception as error:  # a module that is not there, or anything that it raises
            raise HostError(f"verifiers cannot load {name}: {type(error).__name__}: {error}") from error
        self._heldout = own if own is None else Tasks(own)
        self._client = Client(
            ClientConfig(
                api_base_url=f"{gateway.url}/v1",
                api_key_var=KEY_VARIABLE,
                timeout=CALL_S,
                max_retries=int(gateway.patience_s / LONGEST_PAUSE_S),
            )
        )

    async def play(self, episode: Episode) -> Sequence[Seat]:
        """Play one episode."""
        if episode.split == "heldout" and self._heldout is not None:
            row = self._heldout.pick("train", episode.index)
        else:
            row = self._train.pick(episode.split, episode.index)
        name = {"antiphon_trajectory": episode.only_trajectory(self.name)}
        done = await self._env.run_rollout(
            row,
            self._client,
            episode.model,
            {**episode.sampling, "extra_body": name},
            state_columns=["trajectory"],
        )
        seat = Seat(done["reward"])
        if error := done.get("error"):
            seat.limit = limit_in(str(error))
            seat.error = None if seat.limit else f"verifiers: {error}"
        for step in done["trajectory"]:
            if step["tokens"]:
                seat.add_context([*step["tokens"]["prompt_ids"], *step["tokens"]["completion_ids"]])
        return [seat]
