"""An environment of another package: installed, named, checked, scored in the sandbox, recorded."""

import asyncio
import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cli.environments import lines
from antiphon.core.config import build_config
from antiphon.core.errors import ConfigError, ContractError
from antiphon.core.messages import Ended, Message, Reply, ToolCall
from antiphon.environments.conversation import user
from antiphon.environments.outside import OutsideEnvironment, folders_of
from antiphon.environments.registry import describe, environment_names, make_environment
from antiphon.environments.scoring.conversations import ConversationPool
from antiphon.environments.scoring.messages import Failed, ScoringTask, Verdict
from antiphon.lineage.documents.graph import origin_facts
from antiphon.lineage.documents.manifest import build_manifest, source_tree
from antiphon.lineage.documents.replay_copy import environment_differences
from antiphon.services.reward.server import scorer_of
from tests.support.bubblewrap import needs_bubblewrap
from tests.support.own_package import EXAMPLE, TURNS, install

NAME = "near_sums:NearSums"
TALKING = """
from antiphon.core.messages import Ended, Message, Tool
from antiphon.environments.conversation import user
from antiphon.environments.generated import GeneratedConversations

class Talk:
    def begin(self, problem, seed):
        return [user(problem.text)]
    def answer(self, reply):
        return Ended(1.0)

class Task(GeneratedConversations):
    conversation = Talk
    def draw(self, random):
        return f"{random.integers(10**6)} =", "1"
"""
HEAD = """
from antiphon.environments.environment import Problem
from antiphon.environments.generated import GeneratedEnvironment

class Task(GeneratedEnvironment):
    def draw(self, random):
        return f"{random.integers(10**6)} =", "1"
    def score(self, problem, completion):
        return 1.0
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("own"))


@pytest.fixture
def named(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The installed package, where PYTHONPATH leads to it."""
    yield from _found(installed, monkeypatch)


def _found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield folder
    for name in ("near_sums", "long_sums", "mine"):
        sys.modules.pop(name, None)


def write(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module `mine` where Python finds it."""
    (folder / "mine.py").write_text(body)
    # Python takes what it compiled for a text of the same second and length.
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    importlib.invalidate_caches()


def outside(name: str, size: int = 8) -> OutsideEnvironment:
    environment = make_environment(name, {}, 0, size, size)
    assert isinstance(environment, OutsideEnvironment)
    return environment


def test_an_installed_package_has_a_name_and_its_class_has_one_too(named: Path) -> None:
    assert "near-sums" in environment_names()
    by_entry, by_class = describe("near-sums"), describe(NAME)
    assert by_entry.package == by_class.package == "near-sums 0.1"
    assert by_entry.parameters == {"largest": 9} and "worth a half" in by_entry.about
    assert by_entry.prompt == by_class.prompt and by_entry.answer == by_class.answer
    assert make_environment("near-sums", {"largest": 5}, 1, 8, 8).problem("train", 3).key == "train-1-3"


def test_the_example_is_as_short_as_the_guide_says() -> None:
    code = (EXAMPLE / "near_sums.py").read_text()
    assert len(code.splitlines()) <= 30
    guide = (Path(__file__).parents[2] / "docs/guides/own-environment.md").read_text()
    assert f"```python\n{code}```" in guide and (EXAMPLE / "pyproject.toml").read_text() in guide


def test_the_example_with_turns_is_as_short_and_as_the_guide_has_it() -> None:
    code = (TURNS / "long_sums.py").read_text()
    assert len(code.splitlines()) <= 30
    guide = (Path(__file__).parents[2] / "docs/guides/own-environment.md").read_text()
    assert f"```python\n{code}```" in guide


def test_a_module_in_the_working_directory_needs_no_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(HEAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        outside("mine:Task").try_out()
    finally:
        sys.modules.pop("mine", None)


@given(seed=st.integers(0, 2**31), sizes=st.tuples(st.integers(1, 40), st.integers(1, 20)))
def test_a_generated_environment_repeats_itself_and_splits_share_nothing(
    seed: int, sizes: tuple[int, int]
) -> None:
    sys.path.append(str(EXAMPLE))
    try:
        one, other = (make_environment(NAME, {"largest": 30}, seed, *sizes) for _ in range(2))
    finally:
        sys.path.remove(str(EXAMPLE))
    texts = {}
    for split, size in zip(("train", "heldout"), sizes, strict=True):
        backwards = [other.problem(split, index) for index in reversed(range(size))]
        problems = [one.problem(split, index) for index in range(size)]
        assert problems == backwards[::-1]
        assert all(one.problem_by_key(problem.key) == problem for problem in problems)
        texts[split] = {problem.text for problem in problems}
        assert len(texts[split]) == size
    assert not texts["train"] & texts["heldout"]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"larges": 3}, "parameters.larges is not a parameter of this task; did you mean largest"),
        ({"q": 3}, "parameters.q is not a parameter of this task; it takes largest"),
        ({"largest": "9"}, "parameters.largest='9' must be of type int"),
        ({"largest": True}, "parameters.largest=True must be of type int"),
        ({"largest": 1}, "train_size=64 is more than the task has: 4096 draws"),
    ],
)
def test_a_wrong_parameter_is_named(named: Path, parameters: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^environment.name={NAME}: environment.*{words}"):
        make_environment(NAME, parameters, 0, 64, 8).problem("train", 63)


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("missing_module:Task", "", "there is no module missing_module; install its package"),
        ("mine:Task", "class Other: pass", "module mine has no class Task; it has Other"),
        ("mine:Task", "", "module mine has no class Task; it has no class"),
        ("mine:", "", "'mine:' is no package.module:Class"),
        ("mine:Task", "1 / 0", "importing mine raised ZeroDivisionError: division by zero"),
        (
            "mine:Task",
            "class Task: pass",
            r"cannot be built from \(parameters, seed, train_size, heldout_size",
        ),
        ("mine:Task", "Task = 3", "module mine has no class Task"),
        (
            "mine:Task",
            "class Task:\n def __init__(self, *a): raise OSError('no file')",
            "building it raised OSErr",
        ),
        (
            "mine:Task",
            "class Task:\n def __init__(self, *a): pass",
            "has no method problem; an environment has",
        ),
        ("mine:Task", HEAD.replace("    def draw", "    def drew"), "mine:Task lacks draw"),
    ],
)
def test_a_class_that_cannot_be_used_is_one_sentence(
    name: str, body: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, body, monkeypatch)
    with pytest.raises(ConfigError, match=f"^environment.name={name}: .*{words}") as caught:
        make_environment(name, {}, 0, 8, 8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            "def reward(self, problem, completions): return [2.0] * len(completions)",
            "2.0, which lies outside 0..1",
        ),
        (
            "def reward(self, problem, completions): return [None] * len(completions)",
            "NoneType instead of a numb",
        ),
        ("def reward(self, problem, completions): return [1.0]", "not one number for each answer"),
        ("def reward(self, problem, completions): return 1.0", "not one number for each answer"),
        (
            "def score(self, problem, completion): return int(completion)",
            r"reward\(\.\.\.\) raised ValueError",
        ),
        ("def draw(self, random): return 7, '7'", r"raised|of type int instead of text"),
        (
            "def draw(self, random): return str(random.random()), 7",
            "answer of .* is of type int instead of text",
        ),
        ("def problem(self, split, index): return 'Add!'", "returned str instead of a Problem"),
        ("def problem(self, split, index): return Problem('', 'Add', '')", "has an empty key"),
        ("def problem(self, split, index): return Problem('k', '', '')", "has an empty text"),
        ("def problem(self, split, index): return {}[index]", r"problem\('train', 0\) raised KeyError: 0"),
        (
            "def problem(self, split, index): return Problem(f'{split}-0-{index}', f'Add {index}', '')\n"
            "    def problem_by_key(self, key): return self.problem(*key.split('-0-'))",
            "heldout-0-0 has the same prompt as train-0-0",
        ),
        ("def problem_by_key(self, key): return self.problem('train', 5)", "is another problem each time"),
        (
            "def draw(self, random): return [*{str(n) for n in range(300)}][random.integers(300)], '1'",
            r"train-0-0 is another problem in another process .* instead of a set",
        ),
        (
            "def problem(self, split, index): return Problem('k', 'Add \\ud83d', '')",
            r"text of problem\('train', 0\) \('k'\) holds '\\ud83d', half a character",
        ),
        (
            "def __init__(self, parameters, *rest): self.path = parameters['path']",
            r"mine:Task needs the parameter path, .*set environment\.parameters\.path",
        ),
    ],
)
def test_an_environment_that_breaks_its_contract_is_one_sentence(
    method: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, f"{HEAD}    {method}\n", monkeypatch)
    with pytest.raises(ConfigError, match=f"^environment.name=mine:Task: .*{words}") as caught:
        outside("mine:Task").try_out()
    assert "\n" not in str(caught.value)


def test_an_unknown_key_is_no_mistake_of_the_configuration(named: Path) -> None:
    for key in ("train-0-8", "train-1-0", "test-0-0", "train-0-x", ""):
        with pytest.raises(ContractError, match="is not one of this environment"):
            outside(NAME).problem_by_key(key)


@pytest.mark.parametrize("sandbox", ["always", "process"])
def test_answers_are_scored_in_a_process_that_finds_the_package(named: Path, sandbox: str) -> None:
    if sandbox == "always":
        needs_bubblewrap()
    tree = {"environment": {"name": "near-sums"}, "reward": {"sandbox": sandbox, "processes": 1}}
    environment = outside("near-sums")
    problem = environment.problem("train", 0)
    near = f"<answer>{int(problem.answer) + 1}</answer>"

    async def score() -> list[Verdict]:
        async with asyncio.timeout(60.0), scorer_of(build_config(tree), environment) as scorer:
            return await scorer.score(problem.key, [f"<answer>{problem.answer}</answer>", near, "?"])

    assert asyncio.run(score()) == [1.0, 0.5, 0.0]


def test_a_reward_outside_of_the_range_is_a_failed_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = HEAD.replace("return 1.0", "return 5.0 if completion == 'much' else 0.5")
    write(tmp_path, body, monkeypatch)
    tree = {"environment": {"name": "mine:Task"}, "reward": {"sandbox": "process", "processes": 1}}
    environment = outside("mine:Task")
    environment.try_out()

    async def score() -> list[Verdict]:
        async with asyncio.timeout(60.0), scorer_of(build_config(tree), environment) as scorer:
            return await scorer.score("train-0-0", ["much", "little"])

    failed, scored = asyncio.run(score())
    assert isinstance(failed, Failed) and "5.0, which lies outside 0..1" in failed.reason and scored == 0.5


def test_a_class_may_state_another_range_of_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = HEAD.replace("return 1.0", "return {'lost': -1.0, 'won': 2.5}.get(completion, 3.0)")
    body = body.replace("    def draw", "    reward_range = (-1, 2.5)\n    only_compares = {}\n    def draw")
    tree = {"environment": {"name": "mine:Task"}, "reward": {"sandbox": "process", "processes": 1}}
    for only_compares in (True, False):
        write(tmp_path, body.replace("{}", f"{only_compares}"), monkeypatch)
        environment = outside("mine:Task")
        assert environment.reward_range == (-1.0, 2.5)
        with pytest.raises(ConfigError, match=r"returned 3\.0, which lies outside -1\.\.2\.5"):
            environment.try_out()

        async def score(environment: OutsideEnvironment = environment) -> list[Verdict]:
            async with asyncio.timeout(60.0), scorer_of(build_config(tree), environment) as scorer:
                return await scorer.score("train-0-0", ["lost", "won", "other"])

        lost, won, failed = asyncio.run(score())
        assert (lost, won) == (-1.0, 2.5)
        assert failed == Failed("the scorer returned 3.0, which lies outside -1..2.5")
    assert describe("mine:Task").reward_range == (-1.0, 2.5)


@pytest.mark.parametrize(
    "stated",
    ["(1, 0)", "(0, 0)", "(0,)", "(0, 1, 2)", "5", "None", "'ab'", "(0, float('inf'))", "(-1e10, 1)"],
)
def test_what_is_no_range_of_rewards_is_a_sentence(
    stated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, f"{HEAD}    reward_range = {stated}\n", monkeypatch)
    with pytest.raises(
        ConfigError, match=r"^environment\.name=mine:Task: reward_range=.* is no pair"
    ) as caught:
        outside("mine:Task")
    assert "\n" not in str(caught.value)


def test_a_class_may_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, f"print('loading', flush=True)\n{HEAD}", monkeypatch)
    tree = {"environment": {"name": "mine:Task"}, "reward": {"sandbox": "process", "processes": 1}}
    environment = outside("mine:Task")
    environment.try_out()

    async def score() -> list[Verdict]:
        async with asyncio.timeout(60.0), scorer_of(build_config(tree), environment) as scorer:
            return await scorer.score("train-0-0", ["1"])

    assert asyncio.run(score()) == [1.0]


def test_the_record_has_a_digest_of_the_package_and_ours_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_config({"environment": {"name": "near-sums"}})
    folder = install(tmp_path)
    finding = _found(folder, monkeypatch)
    next(finding)
    before = build_manifest(config, "demo-1", source_tree())
    module = folder / "near_sums.py"
    module.write_text(module.read_text().replace("worth a half", "worth 0.5"))
    after = build_manifest(config, "demo-1", source_tree())
    next(finding, None)
    assert before["environment"] | {"digest": ""} == {
        "class": NAME,
        "release": "near-sums 0.1",
        "digest": "",
    }
    assert before["code"] == after["code"] and before["environment"] != after["environment"]
    (said,) = environment_differences(before, after)
    assert said.startswith(f"the environment was {NAME} near-sums 0.1 (") and said.count("near-sums 0.1") == 2
    assert environment_differences(before, {**before, "environment": {}})[0].endswith("and is absent")
    split = origin_facts(config, before, {})["origins/train.json"]
    assert split["package"] == before["environment"]
    assert "environment" not in build_manifest(build_config({}), "demo-1", source_tree())


def test_a_class_may_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path,
        f"{HEAD}    def explain(self, problem, completion, reward): return completion.upper()\n",
        monkeypatch,
    )
    environment = outside("mine:Task")
    assert environment.explain(environment.problem("train", 0), "why", 0.0) == "WHY"
    write(tmp_path, HEAD, monkeypatch)
    assert not hasattr(outside("mine:Task"), "explain")


@pytest.mark.parametrize("sandbox", [True, False])
def test_an_installed_package_with_turns_and_a_tool_is_found_checked_and_answers(
    sandbox: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sandbox:
        needs_bubblewrap()
    finding = _found(install(tmp_path, example=TURNS), monkeypatch)
    next(finding)
    said = describe("long-sums")
    assert said.package == "long-sums 0.1" and said.opening == (user(said.prompt),)
    assert [tool.name for tool in said.tools] == ["add"] and said.reward_range == (0.0, 1.0)
    assert {"  add(a, b)  Add two numbers.", f"  user: {said.prompt}"} <= set(lines(said))
    environment = outside("long-sums")
    environment.try_out()
    problem = environment.problem("train", 0)
    folders, readable = folders_of("long-sums")
    task = ScoringTask(*("long-sums", {}, 0, 8, 8, 20.0, 1 << 30), folders=folders, readable=readable)
    called = Reply("", tool_calls=(ToolCall("add", {"a": 40, "b": 2}),))

    async def story() -> None:
        options = {"processes": 1, "attempts": 1, "sandbox": sandbox, "patience_s": 1.0}
        async with asyncio.timeout(60.0), ConversationPool(environment, task, **options) as pool:
            assert await pool.answer("a", problem.key, 1, [called]) == (Message("tool", "42", name="add"),)
            right = Reply(f"The sum is {problem.answer}")
            assert await pool.answer("a", problem.key, 1, [called, right]) == Ended(1.0)

    asyncio.run(story())
    with pytest.raises(ContractError, match="long-sums has turns; its conversations give the rewards"):
        environment.reward(problem, ["1"])
    next(finding, None)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("    conversation = Talk\n", "", "mine:Task lacks conversation"),
        ("= Talk\n", "= Talk\n    rebuildable = 'yes'\n", "rebuildable='yes' must be True or False"),
        ("= Talk\n", "= Talk\n    reward_range = (1, 0)\n", r"reward_range=\(1, 0\) is no pair"),
        ("= Talk\n", "= Talk\n    reward_range = (0, 1e999)\n", "is no pair"),
        ("= Talk\n", "= Talk\n    reward_range = 1\n", "reward_range=1 is no pair"),
        ("= Talk\n", "= Talk\n    unfinished_reward = 2\n", "unfinished_reward=2 is no number from 0 to 1"),
        ("= Talk\n", "= Talk\n    tools = ['add']\n", "tools has a str instead of a Tool"),
        ("= Talk\n", "= Talk\n    tools = [Tool('a', '', {})] * 2\n", "tools has two of the name 'a'"),
        ("class Talk:\n", "class Talk:\n    functions = (len,)\n", "the tool len has a parameter without"),
        ("[user(problem.text)]", "[]", "begin.* of train-0-0: the environment returned no message"),
        (
            "[user(problem.text)]",
            "[user(__import__('os').urandom(9).hex())]",
            "gives other messages each time",
        ),
        ("[user(problem.text)]", "[user(str({*'abcdefgh'}))]", "is another problem in another process"),
        ("Ended(1.0)", "Ended(2.0)", "reply '1': the environment ended with the reward 2.0, which lies out"),
        ("Ended(1.0)", "float(reply.text)", "reply '1': the environment returned float instead of messages"),
        ("Ended(1.0)", "Ended(float(reply.text))", "to the reply '': the environment raised ValueError"),
    ],
)
def test_an_environment_with_turns_that_breaks_its_contract_is_one_sentence(
    old: str, new: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, TALKING, monkeypatch)
    outside("mine:Task").try_out()
    write(tmp_path, TALKING.replace(old, new), monkeypatch)
    with pytest.raises(ConfigError, match=f"^environment.name=mine:Task: .*({words})") as caught:
        outside("mine:Task").try_out()
    assert "\n" not in str(caught.value)
