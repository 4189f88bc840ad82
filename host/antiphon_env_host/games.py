"""Games: textarena in this process, openenv servers by URL; both through the gateway's chat completions.

Each seat has a conversation of its own with the one model; what a seat is told since its last turn is one
message of the user.
"""

import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from antiphon_env_host.gateway import Gateway, HostError, LimitError
from antiphon_env_host.hosting import Episode, Program, Seat

SEEDS = 2**31
"""Seeds of environments are below this, which every generator takes."""
LARGEST_MESSAGE = 100 * 2**20


class Talk:
    """The conversation of one seat."""

    def __init__(self, gateway: Gateway, episode: Episode, trajectory: str, system: str | None) -> None:
        self.seat = Seat()
        self._gateway = gateway
        self._messages = [{"role": "system", "content": system}] if system else []
        self._asked = {**episode.sampling, "model": episode.model, "antiphon_trajectory": trajectory}

    async def say(self, text: str) -> str:
        """Say something to the model and return its answer."""
        self._messages.append({"role": "user", "content": text})
        body = {**self._asked, "messages": self._messages}
        try:
            answer = await self._gateway.post("/v1/chat/completions", body)
        except LimitError as end:
            self.seat.limit = end.limit
            raise
        (choice,) = answer["choices"]
        self.seat.add_context([*answer["prompt_token_ids"], *choice["token_ids"]])
        self._messages.append(choice["message"])
        return choice["message"]["content"] or ""


class TextArena(Program):
    """A game of the package textarena; the model plays all seats, and one that reaches a limit loses 1.

    Args:
        game: its id, such as KuhnPoker-v0.
        arguments: for `textarena.make`.
        system: the system prompt of all seats.

    Raises:
        HostError: when there is no such game.
    """

    def __init__(self, gateway: Gateway, game: str, arguments: dict[str, Any], system: str | None) -> None:
        try:
            import textarena
        except ImportError as error:
            raise HostError(f"textarena cannot be imported: {error}; pip install textarena") from None
        # Games with wrappers repeat all that was said before in each observation; raw ones say what is new.
        known, raw = textarena.envs.registration.ENV_REGISTRY, f"{game}-raw"
        game_id = raw if raw in known else game
        if game_id not in known:
            near = sorted(name for name in known if name.lower().startswith(game.split("-")[0].lower()))
            raise HostError(
                f"textarena has no game {game}; it has {', '.join(near) or f'{len(known)} others'}"
            )
        self._gateway, self._system = gateway, system
        self._make: Callable[[], Any] = lambda: textarena.make(game_id, **arguments)

    async def play(self, episode: Episode) -> Sequence[Seat]:
        """Play one game."""
        talks = [Talk(self._gateway, episode, name, self._system) for name in episode.trajectories]
        game, seed = self._make(), episode.seed % SEEDS
        chance = random.Random(seed).getstate()

        def alone(step: Any, *arguments: Any, **named: Any) -> Any:
            # Games draw from the one generator of the process: each has a state of its own between its steps.
            nonlocal chance
            random.setstate(chance)
            result = step(*arguments, **named)
            chance = random.getstate()
            return result

        alone(game.reset, num_players=len(talks), seed=seed)
        done, player = False, 0
        try:
            while not done:
                player, told = alone(game.get_observation)
                done, _ = alone(game.step, await talks[player].say(_heard(player, told)))
            rewards, _ = game.close()
        except LimitError:
            rewards = {seat: -float(seat == player) for seat in range(len(talks))}
        for number, talk in enumerate(talks):
            talk.seat.reward = float(rewards[number])
        return [talk.seat for talk in talks]


def _heard(player: int, told: Any) -> str:
    """Return what a player hears: not what he said himself."""
    if isinstance(told, str):
        return told
    others = [(who, text) for who, text, *_ in told if who != player]
    return "\n".join(text if who < 0 else f"[Player {who}] {text}" for who, text in others)


class OpenEnv(Program):
    """An openenv server, of one seat; an episode is one connection to its `/ws`.

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        action_key: field of the server's action that gets the model's text.
        observation_key: field of the observation that the model is told; without it, all fields as JSON.
        arguments: more fields of each action.
        system: the system prompt.
    """

    def __init__(
        self,
        gateway: Gateway,
        url: str,
        action_key: str,
        observation_key: str | None,
        arguments: dict[str, Any],
        system: str | None,
    ) -> None:
        try:
            from websockets.asyncio.client import connect
        except ImportError as error:
            raise HostError(
                f"openenv servers need websockets: {error}; pip install 'websockets>=13'"
            ) from None
        self.name = f"openenv:{url}"
        self._gateway, self._system, self._arguments = gateway, system, arguments
        self._action_key, self._observation_key = action_key, observation_key
        address = url.rstrip("/").replace("http", "ws", 1) + "/ws"
        self._connect: Callable[[], Any] = lambda: connect(address, max_size=LARGEST_MESSAGE)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """See that the server answers."""
        try:
            async with self._connect():
                pass
        except Exception as error:  # of the library, whichever it is
            raise HostError(f"{self.name}: there is no server: {error}") from error
        yield

    async def play(self, episode: Episode) -> Sequence[Seat]:
        """Play one episode; its reward is the sum of the steps' rewards."""
        talk = Talk(self._gateway, episode, episode.only_trajectory(self.name), self._system)
        seat, seat.reward = talk.seat, 0.0
        async with self._connect() as server:
            state = await self._ask(server, "reset", {"seed": episode.seed % SEEDS})
            with suppress(LimitError):
                while not state["done"]:
                    reply = await talk.say(self._text(state["observation"]))
                    state = await self._ask(server, "step", {**self._arguments, self._action_key: reply})
                    seat.reward += state["reward"] or 0.0
        return [seat]

    async def _ask(self, server: Any, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Return the observation that answers a message.

        Raises:
            ValueError: when the server says that something is wrong.
        """
        await server.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await server.recv())
        if answer["type"] != "observation":
            raise ValueError(answer["data"].get("message", answer))
        return dict(answer["data"])

    def _text(self, observation: dict[str, Any]) -> str:
        """Return what the model is told of an observation."""
        if self._observation_key is None:
            return json.dumps({name: value for name, value in observation.items() if name != "metadata"})
        if self._observation_key not in observation:
            raise HostError(
                f"--observation-key={self._observation_key} is no field of the observation; "
                f"it has {', '.join(observation)}"
            )
        return str(observation[self._observation_key])
