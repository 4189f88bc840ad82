"""Conversations: whatever happens to processes, a trajectory hears what an undisturbed conversation says."""

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError
from antiphon.core.messages import Ended, Message, Reply, ToolCall
from antiphon.environments.conversation import ConversationEnvironment, opening, user
from antiphon.environments.scoring.conversations import (
    ConversationPool,
    Conversations,
    InProcessConversations,
)
from antiphon.environments.scoring.messages import Failed, Lost, ScoringTask, Turn, parse_turn, turn_line
from antiphon.environments.tools import call, sandboxed_tools, tool_of
from antiphon.environments.turn_tasks import Sums
from tests.support.bubblewrap import needs_bubblewrap
from tests.support.talking import FACTORY, FOLDER, LARGEST, Adding, Guessing, Talking, add, divide

DEADLINE_S = 240.0
KEY, SEED = "train-0-7", 11
KILLS = 12


def run(story: Awaitable[None]) -> None:
    async def body() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await story

    asyncio.run(body())


def environment(kind: str, rebuildable: bool = True) -> ConversationEnvironment:
    return cast(ConversationEnvironment, Talking(kind, rebuildable=rebuildable))


def make_pool(
    kind: str = "guessing",
    *,
    sandbox: bool = True,
    rebuildable: bool = True,
    processes: int = 1,
    answer_timeout_s: float = 20.0,
    patience_s: float = 10.0,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    **bounds: Any,
) -> ConversationPool:
    if sandbox:
        needs_bubblewrap()
    parameters = {"rebuildable": rebuildable}
    task = ScoringTask(
        *(kind, parameters, 0, 8, 8, answer_timeout_s, 1 << 30, FACTORY, (FOLDER,), (FOLDER,)),
        secrets={"JUDGE_KEY": "sk1"},
    )
    return ConversationPool(
        environment(kind, rebuildable),
        task,
        processes=processes,
        attempts=3,
        sandbox=sandbox,
        patience_s=patience_s,
        sleep=sleep,
        **bounds,
    )


def make(kind: str, where: str) -> Conversations:
    if where == "in process":
        return InProcessConversations(environment(kind))
    return make_pool(kind, sandbox=where == "sandbox")


def forks(pool: ConversationPool, sandboxed: bool = True) -> list[psutil.Process]:
    """Return the processes of conversations, as the machine sees them."""
    found = []
    for process in pool.processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it was killed just now
            holder = psutil.Process(process.pid)
            found += (holder.children()[0] if sandboxed else holder).children()
    return found


def undisturbed(replies: Sequence[Reply], seed: int = SEED) -> Turn:
    """Return the last turn of a conversation of the guessing game that nothing happens to."""
    conversation = Guessing()
    conversation.begin(Talking("guessing").problem_by_key(KEY), seed)
    turns = [conversation.answer(reply) for reply in replies]
    return turns[-1] if isinstance(turns[-1], Ended) else tuple(turns[-1])


def bisected(seed: int) -> list[Reply]:
    """Return the guesses of a good player, the last of which is right."""
    guesses: list[Reply] = []
    low, high = 0, LARGEST
    while True:
        guesses.append(Reply(str((low + high) // 2)))
        turn = undisturbed(guesses, seed)
        if isinstance(turn, Ended):
            return guesses
        assert isinstance(turn, tuple)
        middle = (low + high) // 2
        low, high = (middle + 1, high) if "higher" in turn[0].content else (low, middle)


everywhere = pytest.mark.parametrize("where", ["in process", "process", "sandbox"])


@everywhere
def test_a_game_a_tool_and_an_echo_say_the_same_everywhere(where: str) -> None:
    async def story() -> None:
        async with make("guessing", where) as pool:
            for seed in range(3):
                game = bisected(seed)
                for turns in range(1, len(game) + 1):
                    assert await pool.answer(str(seed), KEY, seed, game[:turns]) == undisturbed(
                        game[:turns], seed
                    )
                after = await pool.answer(str(seed), KEY, seed, [*game, Reply("1")])
                assert after == Failed(f"the trajectory ended with reply {len(game)}")
        async with make("adding", where) as pool:
            calls = tuple(ToolCall("add", {"a": 1, "b": value}, f"c{value}") for value in (2, 3))
            assert await pool.answer("a", KEY, SEED, [Reply("", "", calls)]) == (
                Message("tool", "3", (), "c2", "add"),
                Message("tool", "4", (), "c3", "add"),
            )
            assert await pool.answer("a", KEY, SEED, [Reply("", "", calls), Reply("7")]) == Ended(1.0)
        async with make("echo", where) as pool:
            assert await pool.answer("e", KEY, SEED, [Reply("hé\n")]) == (user("You said: hé\n"),)
            assert await pool.answer("e", KEY, SEED, [Reply("hé\n"), Reply("?")]) == Ended(-2.0)

    run(story())


def test_an_environment_that_hangs_in_this_process_costs_its_trajectory_and_no_other() -> None:
    class Hanging:
        def begin(self, problem: Any, seed: int) -> Sequence[Message]:
            return [user("?")]

        def answer(self, reply: Reply) -> Sequence[Message]:
            if reply.text == "hang":
                released.wait(DEADLINE_S)
            return [user(reply.text)]

    async def story() -> None:
        hanging = environment("echo")
        hanging.conversation = Hanging  # type: ignore[method-assign]
        async with InProcessConversations(hanging, answer_timeout_s=0.5) as conversations:
            found = await conversations.answer("a", KEY, SEED, [Reply("hang")])
            assert found == Failed("the environment did not answer within 1 s")
            assert await conversations.answer("b", KEY, SEED, [Reply("1")]) == (user("1"),)
            found = await conversations.answer("b", KEY, SEED, [Reply("1"), Reply("hang")])
            assert found == Failed("the environment did not answer within 0.5 s")
            ended = await conversations.answer("b", KEY, SEED, [Reply("1"), Reply("hang"), Reply("2")])
            assert ended == Failed("the trajectory ended with reply 2")
            for number in range(20):  # quick ones need no thread each
                assert await conversations.answer(f"c{number}", KEY, SEED, [Reply("1")]) == (user("1"),)
            assert conversations._threads <= 8

    released = threading.Event()
    try:
        run(story())
    finally:
        released.set()


@pytest.mark.parametrize("where", ["process", "sandbox"])
def test_what_an_environment_does_wrong_is_one_sentence_and_harms_no_other(where: str) -> None:
    wrong = {
        "1/0": "the environment raised ZeroDivisionError: division by zero",
        "{}['sk1']": "the environment raised KeyError: '$JUDGE_KEY'",
        "sys.exit(3)": "the environment raised SystemExit: 3",
        "bytearray(1 << 40)": "the environment raised MemoryError",
        "None": "the environment returned NoneType instead of messages or an end",
        "'Go on'": "the environment returned str instead of messages or an end",
        "[]": "the environment returned no message",
        "[user('')]": "the environment returned a message of the user without text",
        "[user(3)]": "the environment returned a message of int instead of text",
        "['Go on']": "the environment returned str instead of a Message",
        "[Message('assistant', 'I')]": "a message of the role 'assistant', not user, tool, system",
        "[user('x' * 10_000_000)]": "the environment returned more than 262,144 characters",
        "[user(chr(0xd800))]": "the environment returned a message with half a character",
        "[Message('user', 'x', self)]": "the environment returned a message that is no plain data",
        "Ended(float('nan'))": "the environment ended with the reward nan, which is no finite number",
        "Ended(float('inf'))": "the environment ended with the reward inf, which is no finite number",
        "Ended(10 ** 400)": "lies outside 0..1",
        "Ended(1.5)": "the environment ended with the reward 1.5, which lies outside 0..1",
        "Ended('1')": "the environment ended with the reward str instead of a number",
        "Ended(1.0, {'a': float('nan')})": "ended with a nan, which is no finite number",
        "os._exit(3)": "the process of the conversation ended (exit code 3)",
        "os.abort()": "the process of the conversation ended (signal ",
        "os.closerange(3, 99)": "the process of the conversation ended",
        "time.sleep(600)": "the environment did not answer within 2 s",
    }

    async def story() -> None:
        async with make_pool("bad", sandbox=where == "sandbox", answer_timeout_s=2.0) as pool:
            assert await pool.answer("good", KEY, SEED, [Reply("[user('1')]")]) == (user("1"),)
            inside = where == "sandbox"
            kept = [one.pid for one in forks(pool, inside)]
            for code, reason in wrong.items():
                found = await pool.answer(code, KEY, SEED, [Reply("[user('0')]"), Reply(code)])
                assert isinstance(found, Failed) and reason in found.reason, (code, found)
                assert not found.infrastructure and "\n" not in found.reason
            assert [one.pid for one in forks(pool, inside)] == kept
            assert await pool.answer("good", KEY, SEED, [Reply("[user('1')]"), Reply("Ended(0.5)")]) == Ended(
                0.5
            )
            assert forks(pool, inside) == []

    run(story())


def test_a_conversation_has_no_pipe_of_another_and_writes_no_turn_of_its_own() -> None:
    async def story() -> None:
        async with make_pool("bad") as pool:
            await pool.answer("other", KEY, SEED, [Reply("[user('1')]")])
            opened = "[fd for fd in range(99) if not os.write(fd, b'x' * 3 + b'\\n') is None]"
            found = await pool.answer("spy", KEY, SEED, [Reply(opened)])
            assert isinstance(found, Failed)
            forged = (
                'os.write(3, b\'{"ended": {"reward": 9.0, "parts": {}, "reason": ""}}\\n\') and [user("x")]'
            )
            for descriptor in range(3, 12):
                text = forged.replace("os.write(3", f"os.write({descriptor}")
                found = await pool.answer(f"forged-{descriptor}", KEY, SEED, [Reply(text)])
                assert isinstance(found, Failed)
            going_on = [Reply("[user('1')]"), Reply("[user('2')]")]
            assert await pool.answer("other", KEY, SEED, going_on) == (user("2"),)

    run(story())


@pytest.mark.parametrize("whom", ["the scoring process", "the conversation"])
def test_kills_in_the_middle_of_conversations_change_no_answer(whom: str) -> None:
    async def story() -> None:
        games = {f"{seed}": bisected(seed) for seed in range(8)}
        async with make_pool(processes=2) as pool:
            kills = asked = 0
            while kills < KILLS:
                for turns in range(1, max(map(len, games.values())) + 1):
                    going = {name: game[:turns] for name, game in games.items() if turns <= len(game)}
                    waiting = [
                        asyncio.create_task(pool.answer(f"{kills}-{name}", KEY, int(name), replies))
                        for name, replies in going.items()
                    ]
                    if whom == "the conversation":
                        victims = [one.pid for one in forks(pool)[:1]]
                    else:
                        await asyncio.sleep(0)
                        victims = [pool.processes[turns % 2].pid or 0]
                    for victim in filter(None, victims):
                        with contextlib.suppress(ProcessLookupError):  # its conversation was over
                            os.kill(victim, signal.SIGKILL)
                            kills += 1
                    expected = [undisturbed(replies, int(name)) for name, replies in going.items()]
                    assert await asyncio.gather(*waiting) == expected
                    asked += len(expected)
                for name in games:
                    await pool.forget(f"{kills}-{name}")
        assert kills >= KILLS and asked > 8 * 5

    run(story())


def test_any_order_of_answers_kills_and_drops_says_what_an_undisturbed_conversation_says() -> None:
    needs = make_pool(sandbox=False, processes=2, most_live=2)
    game = bisected(SEED)[:-1]
    guesses = st.sampled_from([*game, Reply("7"), Reply("?")])
    doing = st.sampled_from(
        ["answer", "answer", "answer", "two at once", "again", "forget", "kill", "kill all"]
    )
    count = iter(range(1 << 30))

    with asyncio.Runner() as runner:
        pool = runner.run(needs.__aenter__())

        @settings(deadline=None, max_examples=40)
        @given(st.lists(st.tuples(doing, st.integers(0, 2), guesses, guesses), max_size=14))
        def interleaved(steps: list[tuple[str, int, Reply, Reply]]) -> None:
            example = next(count)
            told: dict[int, list[Reply]] = {0: [], 1: [], 2: []}

            async def story() -> None:
                for step, name, reply, other in steps:
                    trajectory = f"{example}-{name}"
                    if step == "forget":
                        await pool.forget(trajectory)
                    elif step in ("kill", "kill all"):
                        ours = pool.processes if step == "kill all" else forks(pool, False)
                        victims = [one.pid for one in ours]
                        for victim in filter(None, victims[: 1 + name]):
                            with contextlib.suppress(ProcessLookupError):  # it had ended by itself
                                os.kill(victim, signal.SIGKILL)
                    else:
                        told[name] += {"answer": [reply], "two at once": [reply, other]}.get(step, [])
                        if told[name]:
                            found = await pool.answer(trajectory, KEY, SEED, told[name])
                            assert found == undisturbed(told[name])
                for name in told:
                    await pool.forget(f"{example}-{name}")

            runner.run(story())

        try:
            interleaved()
        finally:
            runner.run(pool.__aexit__(None, None, None))


def test_a_state_that_cannot_be_built_again_is_said_to_be_gone() -> None:
    async def story() -> None:
        async with make_pool(rebuildable=False, most_live=2) as pool:
            replies = [Reply("50"), Reply("?")]
            assert await pool.answer("a", KEY, SEED, replies[:1]) == undisturbed(replies[:1])
            for one in forks(pool):
                one.kill()
            assert await pool.answer("a", KEY, SEED, replies[:1]) == undisturbed(replies[:1])
            gone = await pool.answer("a", KEY, SEED, replies)
            assert isinstance(gone, Failed) and gone.infrastructure and "is gone: the process" in gone.reason
            for name in "bc":
                await pool.answer(name, KEY, SEED, replies[:1])
            full = await pool.answer("d", KEY, SEED, replies[:1])
            assert isinstance(full, Failed) and full.infrastructure
            assert full.reason.startswith("2 conversations are held already")
            assert await pool.answer("b", KEY, SEED, replies) == undisturbed(replies)
            unknown = await pool.answer("e", KEY, SEED, replies)
            assert isinstance(unknown, Failed) and "is gone" in unknown.reason

    run(story())


def test_of_too_many_conversations_the_longest_idle_one_is_dropped_and_built_again() -> None:
    async def story() -> None:
        async with make_pool(most_live=3) as pool:
            replies = [Reply("50"), Reply("?"), Reply("7")]
            for turns in (1, 2, 3):
                for name in range(6):
                    found = await pool.answer(str(name), KEY, SEED, replies[:turns])
                    assert found == undisturbed(replies[:turns])
                    assert len(forks(pool)) <= 3
        async with make_pool(idle_s=0.0) as pool:
            for name in range(4):
                await pool.answer(str(name), KEY, SEED, replies[:1])
            assert len(forks(pool)) == 1

    run(story())


def test_a_caller_that_gives_up_finds_the_turn_when_it_asks_again() -> None:
    async def story() -> None:
        async with make_pool(rebuildable=False) as pool:
            first = asyncio.create_task(pool.answer("a", KEY, SEED, [Reply("50")]))
            await asyncio.sleep(0)
            first.cancel()
            assert await pool.answer("a", KEY, SEED, [Reply("50")]) == undisturbed([Reply("50")])
            assert len(forks(pool)) == 1

    run(story())


def test_processes_that_cannot_be_started_are_no_mistake_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async def sleep(seconds: float) -> None:
            """Waits for nothing."""

        async with make_pool(patience_s=3.0, sleep=sleep) as pool:
            path = os.environ["PATH"]
            monkeypatch.setenv("PATH", "/nowhere")
            await pool.processes[0].end()
            failed = await pool.answer("a", KEY, SEED, [Reply("50")])
            assert isinstance(failed, Failed) and failed.infrastructure
            assert failed.reason.startswith("no scoring process could be started for 3 s")
            monkeypatch.setenv("PATH", path)
            assert await pool.answer("a", KEY, SEED, [Reply("50")]) == undisturbed([Reply("50")])
            unknown = await pool.answer("b", "train-0-x", SEED, [Reply("50")])
            assert isinstance(unknown, Failed)

    run(story())


def test_tools_of_the_sandbox_are_refused_where_there_is_none() -> None:
    async def story() -> None:
        with pytest.raises(ConfigError, match=r"its tool shell runs in the sandbox alone; set reward\."):
            async with make_pool("tooled", sandbox=False):
                pass

    run(story())
    with pytest.raises(ConfigError, match="its tool shell runs in the sandbox alone; leave out"):
        InProcessConversations(environment("tooled"))


@given(
    st.lists(st.builds(Message, st.sampled_from(["user", "tool", "system"]), st.text(min_size=1)), min_size=1)
    | st.builds(
        Ended, st.floats(-2.0, 2.0), st.dictionaries(st.text(max_size=9), st.floats(-9, 9), max_size=16)
    )
    | st.builds(Failed, st.just("no"), st.booleans())
    | st.builds(Lost, st.just("no"), st.booleans())
)
def test_a_turn_crosses_the_pipe_as_it_was(turn: Any) -> None:
    made = tuple(turn) if isinstance(turn, list) else turn
    line = turn_line(made)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert parse_turn(line, (-2.0, 2.0)) == made


@given(st.binary() | st.from_regex(rb'\{"(messages|ended|failed|lost)": .{0,20}\}', fullmatch=True))
def test_what_a_reply_forges_is_a_turn_or_an_error_and_no_reward_out_of_range(line: bytes) -> None:
    try:
        found = parse_turn(line, (0.0, 1.0))
    except Exception as error:  # noqa: BLE001 - whatever it is
        assert type(error).__name__ == "ContractError"
    else:
        assert not isinstance(found, Ended) or 0.0 <= found.reward <= 1.0


def test_a_tool_is_its_signature_and_what_is_wrong_with_a_call_is_said_to_the_policy() -> None:
    told = tool_of(divide)
    assert told.description == "Divide two numbers." and told.parameters["required"] == ["a", "b"]
    assert list(tool_of(Adding.fetch).parameters["properties"]) == ["what"]
    functions = (add, divide)
    for asked, said in {
        ("add", '{"a": 1, "b": 2}'): "3",
        ("add", '{"a": 1}'): "add cannot be called so: b: missing required argument",
        ("add", '{"a": 1, "b": [2]}'): "add cannot be called so: b: input should be a valid integer",
        ("add", '{"a": 1, "b": 2, "c": 3}'): "add cannot be called so: c: unexpected keyword argument",
        ("divide", '{"a": 1, "b": 0}'): "divide failed: b must not be 0",
        ("multiply", "{}"): "there is no tool 'multiply'; there are add, divide",
    }.items():
        message = call(functions, ToolCall(asked[0], json.loads(asked[1]), "c7"), "")
        assert message.content == said and message.tool_call_id == "c7" and message.role == "tool"
    assert sandboxed_tools(environment("tooled").tools) == ["shell", "python"]
    assert sandboxed_tools([tool_of(add)]) == []

    def silent(a: int) -> int:
        return a

    with pytest.raises(ConfigError, match="the tool silent has no docstring"):
        tool_of(silent)

    def odd(a: Talking) -> int:
        """Take what no JSON can be."""
        return 1

    with pytest.raises(ConfigError, match="the tool odd has a parameter without a JSON schema"):
        tool_of(odd)


def test_an_opening_is_the_same_for_the_same_seed() -> None:
    game = environment("guessing")
    problem = game.problem_by_key(KEY)
    assert opening(game, problem, 1) == opening(game, problem, 1) == (user("Guess a number below 100."),)


def test_problems_are_drawn_in_order_while_many_conversations_begin() -> None:
    """Threads that drew them would give a key another problem than the coordinator's."""
    ours = Sums({}, seed=0, train_size=64, heldout_size=8)
    keys = [ours.problem("train", index).key for index in range(64)]

    async def ask() -> list[Turn]:
        async with InProcessConversations(Sums({}, seed=0, train_size=64, heldout_size=8)) as conversations:
            asked = (
                conversations.answer(key, key, 0, [Reply(ours.problem_by_key(key).answer)])
                for key in reversed(keys)
            )
            return await asyncio.gather(*asked)

    assert asyncio.run(ask()) == [Ended(1.0)] * len(keys)
