"""A host takes groups, plays and reports them, whatever environments and the gateway do."""

import asyncio
import doctest
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from antiphon_env_host import gateway as gateway_module
from antiphon_env_host import hosting
from antiphon_env_host.__main__ import _parser, _program
from antiphon_env_host.games import OpenEnv, Talk, TextArena
from antiphon_env_host.gateway import Gateway, HostError
from antiphon_env_host.hosting import Episode, Host, Seat, Tasks
from hypothesis import given
from hypothesis import strategies as st

from antiphon.benchmarks.parts.scripted_gateway import TOKEN, ScriptedGateway, until
from tests.support.real_gateway import Served, say_to_hosts

ROOT = Path(__file__).parents[2]
HOST = ROOT / "host"
GAMES = ROOT / "tests" / "support" / "hosted"


def echo(name: str, turn: int, text: str) -> str:
    return text.rsplit("user\n", 1)[-1].split("<|im_end|>")[0]


class Words:
    """Says a word to each seat in turn, as often as asked; the reward is how many came back."""

    def __init__(self, gateway: Gateway, words: Sequence[str] = ("one", "two"), reward: float | None = None):
        self.gateway, self.words, self.reward = gateway, words, reward
        self.trouble: Callable[[Episode], Any] = lambda episode: None
        self.begun = 0

    def serving(self) -> nullcontext[None]:
        return nullcontext()

    async def play(self, episode: Episode) -> Sequence[Seat]:
        self.begun += 1
        talks = [Talk(self.gateway, episode, name, "Repeat.") for name in episode.trajectories]
        right = 0.0
        for word in self.words:
            for talk in talks:
                right += await talk.say(word) == word
            if (wait := self.trouble(episode)) is not None:
                await wait
        for talk in talks:
            talk.seat.reward = right if self.reward is None else self.reward
        return [talk.seat for talk in talks]


@asynccontextmanager
async def hosted(
    served: ScriptedGateway, program: Words | None = None, **options: Any
) -> AsyncIterator[Host]:
    """Run a host; its name is `me` unless said."""
    gateway = Gateway(served.url, options.pop("token", TOKEN), options.pop("patience_s", 60.0))
    program = program or Words(gateway)
    program.gateway = gateway
    settings = {"name": "me", "concurrency": 4, "episode_s": 60.0} | options
    host = Host(gateway, program, **settings)
    running = asyncio.create_task(host.run())
    try:
        yield host
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, ExceptionGroup, HostError):
            await running


def test_groups_are_played_and_reported_with_their_tokens() -> None:
    async def play(served: ScriptedGateway) -> None:
        async with hosted(served) as host:
            await until(lambda: host.counts["reported"] == 8)
            assert host.counts == {"taken": 4, "reported": 8, "failed": 0, "refused": 0}

    with ScriptedGateway(echo) as served:
        for number in range(4):
            served.offer(f"g{number}", episodes=2, seats=2, index=number)
        asyncio.run(play(served))
    seats = {seat["trajectory"]: seat for report in served.reports for seat in report["seats"]}
    assert set(seats) == {f"g{group}/{sample}" for group in range(4) for sample in range(4)}
    for name, seat in seats.items():
        assert seat["reward"] == 4.0 and "error" not in seat
        (branch,) = seat["branches"]
        assert branch == served.rows[name].branches()[0] and len(served.rows[name].turns) == 2


def test_the_gateway_of_a_run_takes_the_reports_and_the_rows_are_what_was_said(tmp_path: Path) -> None:
    async def play(served: Served) -> None:
        gateway = Gateway(served.url, served.token, 60.0)
        host = Host(gateway, Words(gateway), "me", 4, 60.0)
        running = asyncio.create_task(host.run())
        await until(lambda: host.counts["reported"] == 6)
        running.cancel()
        assert host.counts == {"taken": 3, "reported": 6, "failed": 0, "refused": 0}

    with say_to_hosts(tmp_path, echo, 3) as found:
        asyncio.run(play(found))
        found.wait_over()
    for row in found.coordinator.rows.values():
        assert row.over is not None and row.over.failure == "" and row.over.reward == 4.0
        assert row.over.host == "me" and len(row.sampled) == 2 and not row.breaks


def test_a_second_host_goes_on_where_the_first_was() -> None:
    """Nothing is sampled again: the recorded turns answer the repeated requests."""
    asked: list[tuple[str, int]] = []

    def say(name: str, turn: int, text: str) -> str:
        asked.append((name, turn))
        return echo(name, turn, text)

    async def play(served: ScriptedGateway) -> None:
        words = Words(None, ("one", "two", "three"))  # type: ignore[arg-type]
        never = asyncio.Event()
        words.trouble = lambda episode: never.wait() if words.begun == 1 else None
        async with hosted(served, words, name="first"):
            await until(lambda: asked)
        served.offer("g")
        async with hosted(served, words, name="second"):
            await until(lambda: served.reports)

    with ScriptedGateway(say) as served:
        served.offer("g")
        asyncio.run(play(served))
    assert asked == [("g/0", 0), ("g/0", 1), ("g/0", 2)]
    assert [report["host"] for report in served.reports] == ["second"]
    assert served.reports[0]["seats"][0]["reward"] == 3.0


def test_a_host_survives_a_gateway_that_is_away_and_one_that_stumbles() -> None:
    async def play(served: ScriptedGateway) -> None:
        words = Words(None, ("one", "two"))  # type: ignore[arg-type]

        async def away() -> None:
            served.stop()
            served.start()
            served.failing.extend([503, 429, 500])

        words.trouble = lambda episode: away() if served.rows["g/0"].turns[1:] == [] else None
        async with hosted(served, words) as host:
            await until(lambda: host.counts["reported"] == 1)
            assert not host.counts["failed"]

    with ScriptedGateway(echo) as served:
        served.offer("g")
        asyncio.run(play(served))
    assert served.reports[0]["seats"][0]["reward"] == 2.0 and not served.failing


@pytest.mark.parametrize(
    ("reward", "trouble", "words"),
    [
        (math.nan, None, "environment: its reward is nan, which is no finite number"),
        (math.inf, None, "environment: its reward is inf, which is no finite number"),
        (None, KeyError("card"), "environment: KeyError: 'card'"),
        (None, TimeoutError(), "environment: the episode took longer than --episode-s=60"),
        (None, ValueError("x" * 900), "environment: ValueError: " + "x" * 475),
    ],
)
def test_what_goes_wrong_in_an_episode_is_reported(reward: float, trouble: Exception, words: str) -> None:
    async def play(served: ScriptedGateway) -> None:
        program = Words(None, reward=reward)  # type: ignore[arg-type]
        program.trouble = lambda episode: raised(trouble) if trouble else None
        async with hosted(served, program) as host:
            await until(lambda: host.counts["reported"] == 1)
            assert host.counts["failed"] == 1 and not host.counts["refused"]

    async def raised(error: Exception) -> None:
        raise error

    with ScriptedGateway(echo) as served:
        served.offer("g", seats=2)
        asyncio.run(play(served))
    for seat in served.reports[0]["seats"]:
        assert seat["error"] == words and "reward" not in seat


@pytest.mark.parametrize(
    "seats", [[], [Seat(reward=1.0)] * 2, [Seat(reward="high")], [Seat(reward=1.0, branches=[[None]])]]
)
def test_results_that_make_no_report_fail_their_episode_alone(seats: list[Any]) -> None:
    class Odd(Words):
        async def play(self, episode: Episode) -> Sequence[Seat]:
            return seats

    async def play(served: ScriptedGateway) -> None:
        async with hosted(served, Odd(None)) as host:  # type: ignore[arg-type]
            await until(lambda: host.counts["failed"] == 1)

    with ScriptedGateway(echo) as served:
        served.offer("g")
        asyncio.run(play(served))
    (seat,) = served.reports[0]["seats"]
    assert seat["error"].startswith("environment: ") and "reward" not in seat


def test_a_group_that_a_host_is_given_again_is_played_once() -> None:
    left = asyncio.Event()

    async def play(served: ScriptedGateway) -> None:
        program = Words(None)  # type: ignore[arg-type]

        async def hang() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                left.set()

        program.trouble = lambda episode: hang() if program.begun == 1 else None
        async with hosted(served, program, concurrency=2) as host:
            await until(lambda: program.begun == 1)
            served.offer("g")
            await until(lambda: left.is_set() and host.counts["reported"] == 1)
            served.offer("h")
            await until(lambda: host.counts["reported"] == 2)

    with ScriptedGateway(echo) as served:
        served.offer("g")
        asyncio.run(play(served))


def test_an_episode_that_hangs_is_reported_and_others_go_on() -> None:
    async def play(served: ScriptedGateway) -> None:
        program, never = Words(None), asyncio.Event()  # type: ignore[arg-type]
        program.trouble = lambda episode: never.wait() if episode.index == 0 else None
        async with hosted(served, program, episode_s=2.0) as host:
            await until(lambda: host.counts["reported"] == 2)

    with ScriptedGateway(echo) as served:
        served.offer("hangs", index=0)
        served.offer("goes", index=1)
        asyncio.run(play(served))
    errors = {report["group"]: report["seats"][0].get("error") for report in served.reports}
    assert errors == {"hangs": "environment: the episode took longer than --episode-s=2", "goes": None}


def test_groups_that_are_lost_are_left_and_the_others_kept_alive() -> None:
    async def play(served: ScriptedGateway) -> None:
        program, never = Words(None), asyncio.Event()  # type: ignore[arg-type]
        program.trouble = lambda episode: never.wait()
        async with hosted(served, program, concurrency=2) as host:
            await until(lambda: any(len(said["groups"]) == 2 for said in served.alive))
            served.lost.add("a")
            served.offer("c")  # there is room for it only once `a` is gone
            await until(lambda: any({*said["groups"]} == {"b", "c"} for said in served.alive))
            assert host.counts["taken"] == 3

    with ScriptedGateway(echo, deadline_s=0.1) as served:
        served.offer("a")
        served.offer("b")
        asyncio.run(play(served))
    assert not served.reports


def test_a_refused_report_is_counted() -> None:
    """Here of a host that changes a token."""

    class Lying(Words):
        async def play(self, episode: Episode) -> Sequence[Seat]:
            (seat,) = await super().play(episode)
            seat.branches[0][-2] += 1
            return [seat]

    async def play(served: ScriptedGateway) -> None:
        async with hosted(served, Lying(None)) as host:  # type: ignore[arg-type]
            await until(lambda: host.counts["refused"] == 1)

    with ScriptedGateway(echo) as served:
        served.offer("g")
        asyncio.run(play(served))


def run_until_it_ends(served: ScriptedGateway, program: Words | None = None, **options: Any) -> str:
    """Return the sentence with which a host ends."""

    async def play() -> str:
        async with hosted(served, program, **options) as host:
            try:
                async with asyncio.timeout(60):
                    await host.run()
            except HostError as error:
                return str(error)
            except ExceptionGroup as group:
                (error,) = group.exceptions
                while isinstance(error, ExceptionGroup):
                    (error,) = error.exceptions
                assert isinstance(error, HostError)
                return str(error)

    return asyncio.run(play())


def test_a_token_that_is_refused_and_a_gateway_that_is_not_there_end_the_host_in_a_sentence() -> None:
    with ScriptedGateway(echo) as served:
        said = run_until_it_ends(served, token="another")
    assert said.startswith(f"the gateway at {served.url} refuses the token: unknown token; give one of scope")
    said = run_until_it_ends(served, patience_s=0.2)
    assert said.startswith(f"the gateway at {served.url} has not answered for 0.2 s: ConnectionRefusedError")


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=6))
def test_branches_have_every_context_once(contexts: list[list[int]]) -> None:
    seat = Seat()
    for context in contexts:
        seat.add_context(context)
    begun = [seat.branches[0]]
    for context in contexts:
        assert any(branch[: len(context)] == context for branch in seat.branches)
    for branch in seat.branches:
        assert branch in contexts
    assert len(seat.branches) <= len(contexts) and begun


@given(st.integers(0, 60), st.integers(0, 100), st.sampled_from(["train", "heldout"]))
def test_no_task_is_in_both_splits(size: int, index: int, split: str) -> None:
    tasks = Tasks(range(size))
    if not size:
        with pytest.raises(HostError, match="has no tasks"):
            tasks.pick(split, index)
    else:
        found = tasks.pick(split, index)
        assert size < 10 or (found % 10 == 9) == (split == "heldout")
        assert tasks.pick(split, index) == found


def test_the_examples_of_its_modules_are_right() -> None:
    for module in (gateway_module, hosting):
        assert doctest.testmod(module).attempted and not doctest.testmod(module).failed


class _Game:
    """Two players of a raw game of textarena: each says a number, drawn ones are told; three rounds."""

    def reset(self, num_players: int, seed: int) -> None:
        import random

        self.random, self.players, self.turn, self.news = random, num_players, 0, {0: [], 1: []}
        for player in self.news:
            self.news[player].append((-1, f"You are {player}. Say {random.randint(0, 9)}", "prompt"))

    def get_observation(self) -> tuple[int, list[tuple[int, str, str]]]:
        player = self.turn % self.players
        said, self.news[player] = self.news[player], []
        return player, said

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        for news in self.news.values():
            news.append((self.turn % self.players, action, "action"))
            news.append((-1, f"drawn {self.random.randint(0, 9)}", "game"))
        self.turn += 1
        return self.turn == 6, {}

    def close(self) -> tuple[dict[int, int], dict[int, Any]]:
        return {0: 1, 1: -1}, {}


@pytest.fixture
def textarena(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    known = {"Numbers-v0": None, "Numbers-v0-raw": None}
    module = SimpleNamespace(
        envs=SimpleNamespace(registration=SimpleNamespace(ENV_REGISTRY=known)), make=lambda game_id: _Game()
    )
    monkeypatch.setitem(sys.modules, "textarena", module)  # type: ignore[arg-type]


def games(say: Callable[[str, int, str], str | None], groups: int) -> ScriptedGateway:
    """Play groups of one game each at the same time, two seats each."""

    async def play(served: ScriptedGateway) -> None:
        gateway = Gateway(served.url, TOKEN, 60.0)
        async with hosted(served, TextArena(gateway, "Numbers-v0", {}, None)) as host:  # type: ignore[arg-type]
            await until(lambda: host.counts["reported"] == groups)

    with ScriptedGateway(say) as served:
        for number in range(groups):
            served.offer(f"g{number}", seats=2, index=number % 2)
        asyncio.run(play(served))
    return served


@pytest.mark.usefixtures("textarena")
def test_games_at_the_same_time_repeat_themselves_by_seed_and_nobody_hears_himself() -> None:
    served = games(lambda name, turn, text: f"{turn}", 4)
    texts = {
        name: served.renderer.codec.tokenizer.decode(row.branches()[0], skip_special_tokens=False)
        for name, row in served.rows.items()
    }
    assert len(texts) == 8 and all(len(row.turns) == 3 for row in served.rows.values())
    assert texts["g0/0"] == texts["g2/0"] and texts["g1/1"] == texts["g3/1"]
    assert texts["g0/0"] != texts["g1/0"]
    assert "[Player 1] 0" in texts["g0/0"] and "[Player 0]" not in texts["g0/0"]
    rewards = {seat["trajectory"]: seat["reward"] for report in served.reports for seat in report["seats"]}
    assert rewards["g0/0"] == 1.0 and rewards["g0/1"] == -1.0


@pytest.mark.usefixtures("textarena")
def test_a_player_who_reaches_a_limit_loses() -> None:
    served = games(lambda name, turn, text: None if name.endswith("1") and turn else "0", 1)
    assert [seat["reward"] for seat in served.reports[0]["seats"]] == [0.0, -1.0]


@pytest.mark.usefixtures("textarena")
def test_a_game_that_is_not_there_is_said() -> None:
    with pytest.raises(
        HostError, match="textarena has no game Numbers-v9; it has Numbers-v0, Numbers-v0-raw"
    ):
        TextArena(Gateway("http://here", "", 1.0), "Numbers-v9", {}, None)


@asynccontextmanager
async def openenv_server(rounds: int) -> AsyncIterator[str]:
    """Serve an environment on the wire of openenv: counts what it is told, a half for each right number."""
    import json

    from websockets.asyncio.server import ServerConnection, serve

    async def session(socket: ServerConnection) -> None:
        count = 0
        async for text in socket:
            asked = json.loads(text)
            if asked["type"] == "reset":
                said: dict[str, Any] = {
                    "observation": {"said": f"seed {asked['data']['seed']}"},
                    "done": False,
                }
                reward = None
            elif asked["data"]["text"] == "bad":
                await socket.send(json.dumps({"type": "error", "data": {"message": "no such action"}}))
                continue
            else:
                count += 1
                reward = 0.5 * (asked["data"]["text"] == str(count))
                said = {"observation": {"said": f"{count} of {rounds}"}, "done": count == rounds}
            await socket.send(json.dumps({"type": "observation", "data": {**said, "reward": reward}}))

    async with serve(session, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def over_openenv(say: Callable[[str, int, str], str | None], key: str | None = "said") -> dict[str, Any]:
    """Play one episode and return what is reported of its seat."""

    async def play(served: ScriptedGateway) -> None:
        async with openenv_server(3) as url:
            program = OpenEnv(Gateway(served.url, TOKEN, 60.0), url, "text", key, {}, None)
            async with hosted(served, program) as host:  # type: ignore[arg-type]
                await until(lambda: host.counts["reported"] == 1)

    with ScriptedGateway(say) as served:
        served.offer("g", index=3)
        asyncio.run(play(served))
    return dict(served.reports[0]["seats"][0])


def test_an_openenv_server_is_played_and_its_rewards_are_added_up() -> None:
    heard = []

    def say(name: str, turn: int, text: str) -> str:
        heard.append(echo(name, turn, text))
        return str(turn + 1)

    assert over_openenv(say)["reward"] == 1.5
    assert heard == ["seed 3", "1 of 3", "2 of 3"]
    assert over_openenv(lambda name, turn, text: None if turn else "1")["reward"] == 0.5


def test_what_an_openenv_server_finds_wrong_is_reported() -> None:
    assert over_openenv(lambda *_: "bad", None)["error"] == "environment: ValueError: no such action"


COMMAND = [sys.executable, "-m", "antiphon_env_host"]


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the program as a person would, in this environment, which has no package of environments."""
    environment = {"PYTHONPATH": f"{HOST}:{GAMES}", "PATH": "/usr/bin:/bin", **variables}
    return subprocess.run([*COMMAND, *words], env=environment, text=True, capture_output=True, timeout=120)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["textarena", "X"], "there is no gateway; name its URL with --gateway or ANTIPHON_GATEWAY"),
        (["--gateway", "here", "textarena", "X"], "--gateway=here is no address; write http://HOST:PORT"),
        (["--gateway", "http://a", "textarena", "X"], "textarena cannot be imported: No module named"),
        (["--gateway", "http://a", "verifiers", "X"], "verifiers is not installed beside this program"),
        (
            ["--gateway", "http://a", "verifiers", "X", "--token-file", "/none"],
            "--token-file=/none cannot be",
        ),
        (
            ["--gateway", "http://a", "openenv", "http://127.0.0.1:9"],
            "openenv:http://127.0.0.1:9: there is no server:",
        ),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], sentence: str) -> None:
    done = run(*words)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith(f"antiphon-env-host: {sentence}"), done.stderr


@pytest.mark.parametrize("version", ["0.3.9", "0.5.0", "1.4.0", "0.14.1"])
def test_a_verifiers_outside_of_the_window_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(HostError, match=f"verifiers {version} is none of those known here, 0.4.x and 0.1.x"):
        _program(Gateway("http://here", "", 1.0), _parser().parse_args(["verifiers", "X"]))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--args", "[1]"), "[1] is no JSON object"),
        (("--args", "{"), "{ is no JSON: "),
        (("--concurrency", "0"), "0 is not between"),
        (("--episode-s", "nan"), "nan is not between"),
    ],
)
def test_an_option_that_cannot_be_is_said(
    words: tuple[str, str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in (["verifiers", "X", *words], [*words, "verifiers", "X"]):
        with pytest.raises(SystemExit):
            _parser().parse_args(line)
        assert f"argument {words[0]}: {sentence}" in capsys.readouterr().err


def test_it_needs_nothing_of_antiphon_and_at_first_nothing_but_the_standard_library() -> None:
    script = (
        "import sys, antiphon_env_host.__main__\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} - {*sys.stdlib_module_names} - {'__main__'}))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(HOST)!r})\n{script}"],
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.stdout.strip() == "['antiphon_env_host']", done.stderr
