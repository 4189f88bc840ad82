"""The scorer gives every token's log-probability, over the wire, and the reward service hands them on."""

import asyncio
import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from antiphon.core.checks import check_reference
from antiphon.core.config import build_config
from antiphon.core.errors import ConfigError, ContractError
from antiphon.core.records import GroupRewards, SampleReward
from antiphon.models.codec import check_reference as check_vocabulary
from antiphon.net.rpc.serving import start_server, stop_server
from antiphon.net.wire import group_rewards_from_proto, group_rewards_to_proto
from antiphon.protos import records_pb2
from antiphon.services.learner.policy import load_causal_model
from antiphon.services.reward.reference import ScorerClient
from antiphon.services.scorer.server import open_scorer, register_scorer
from antiphon.services.scorer.service import ScorerService
from tests.support.small_policy import make_model

MODEL = Path(__file__).parents[3] / "examples" / "models" / "chain-sum"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_over_the_wire_are_those_of_one_forward_pass(temperature: float) -> None:
    torch.manual_seed(3)
    model, rng = make_model().eval(), np.random.default_rng(3)
    vocabulary = model.config.vocab_size
    prompt = rng.integers(0, vocabulary, 5).astype(np.int32)
    completions = [rng.integers(0, vocabulary, length).astype(np.int32) for length in (1, 9, 4)]

    async def ask(tokens: list[np.ndarray]) -> list[np.ndarray]:
        service = ScorerService(model, temperature)
        server, port = await start_server("127.0.0.1", 0, lambda s: register_scorer(s, service), [])
        async with ScorerClient(f"127.0.0.1:{port}", 20.0) as client:
            try:
                return list(await client.score(prompt, tokens))
            finally:
                await stop_server(server)

    for tokens, found in zip(completions, asyncio.run(ask(completions)), strict=True):
        whole = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
        with torch.no_grad():
            every = (model(whole).logits[0, 4:-1].double() / temperature).log_softmax(1)
        expected = every[torch.arange(tokens.size), whole[0, 5:]]
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    with pytest.raises(ContractError, match=f"no token beyond {vocabulary - 1}"):
        asyncio.run(ask([np.array([vocabulary], dtype=np.int32)]))


def test_what_nobody_waits_for_any_more_does_not_run_beside_the_next() -> None:
    model, running, most = make_model().eval(), [0], [0]
    entered, leave, score = threading.Event(), threading.Event(), ScorerService._score

    class Slow(ScorerService):
        def _score(self, prompt: np.ndarray, completions: Sequence[np.ndarray]) -> list[np.ndarray]:
            running[0] += 1
            most[0] = max(most[0], running[0])
            entered.set()
            assert leave.wait(30.0)
            found = score(self, prompt, completions)
            running[0] -= 1
            return found

    async def story() -> None:
        service, tokens = Slow(model, 1.0), np.array([1, 2], dtype=np.int32)
        first = asyncio.create_task(service.score(tokens, [tokens]))
        await asyncio.to_thread(entered.wait, 30.0)
        first.cancel()  # as a deadline does
        with pytest.raises(asyncio.CancelledError):
            await first
        entered.clear()
        second = asyncio.create_task(service.score(tokens, [tokens]))
        assert not await asyncio.to_thread(entered.wait, 0.2)
        leave.set()
        (found,) = await second
        assert found.shape == (2,) and most == [1]

    asyncio.run(story())


def test_a_float32_head_of_the_run_is_the_reference_models_too() -> None:
    tree = {"model": {"path": str(MODEL), "dtype": "bfloat16", "head": "float32"}, "reference": {"kl": 0.1}}
    service = open_scorer(build_config(tree))
    assert isinstance(service, ScorerService)
    tokens = np.arange(4, 40, dtype=np.int32)
    (found,) = asyncio.run(service.score(tokens[:2], [tokens[2:]]))
    model = load_causal_model(str(MODEL), torch.bfloat16, False)
    with torch.no_grad():
        states = model.get_decoder()(torch.from_numpy(tokens.astype(np.int64))[None]).last_hidden_state[0]
        logits = states.float() @ model.get_output_embeddings().weight.float().T
    wanted = logits.log_softmax(1)[torch.arange(1, len(tokens) - 1), torch.from_numpy(tokens[2:]).long()]
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)


def test_rewards_with_a_reference_come_back_and_those_without_are_as_before() -> None:
    said = tuple(np.array(values, dtype=np.float32) for values in ([-1.5, -0.25], [], [-3.0]))
    rewards = GroupRewards("g0", tuple(SampleReward(index, 1.0) for index in range(3)), said)
    encoded = group_rewards_to_proto(rewards).SerializeToString()
    found = group_rewards_from_proto(records_pb2.GroupRewards.FromString(encoded))
    assert found.samples == rewards.samples
    assert [one.tolist() for one in found.reference_logprobs] == [one.tolist() for one in said]
    bare = GroupRewards("g0", rewards.samples)
    message = group_rewards_to_proto(bare)
    assert group_rewards_from_proto(message).reference_logprobs == () and not message.reference_logprobs


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([[-1.0], [-1.0, -2.0]], ""),
        ([[-1.0]], "but got"),
        ([[-1.0], [-1.0]], "but got"),
        ([[-1.0], [-1.0, float("nan")]], "sample 1"),
        ([[0.5], [-1.0, -2.0]], "sample 0"),
    ],
)
def test_only_one_finite_number_for_each_token_is_taken(given: list[list[float]], named: str) -> None:
    arrays = [np.array(values, dtype=np.float32) for values in given]
    if not named:
        check_reference("g0", arrays, (1, 2))
        return
    with pytest.raises(ContractError, match=named):
        check_reference("g0", arrays, (1, 2))


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    check_vocabulary(str(MODEL), "")
    check_vocabulary(str(MODEL), str(MODEL))
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    check_vocabulary(str(MODEL), str(other))
    config = json.loads((other / "config.json").read_text())
    config["vocab_size"] += 8
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has another vocabulary"):
        check_vocabulary(str(MODEL), str(other))
    with pytest.raises(ConfigError, match="reference"):
        check_vocabulary(str(MODEL), str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"reference": {"model": "x"}}, "reference.model has no effect without reference.kl"),
        ({"reference": {"distillation": 1.0}}, "set loop.filter=none"),
        ({"reference": {"kl": 0.1, "keep_reward": False}}, "leaves nothing to learn from"),
        ({"reference": {"kl": 0.1}, "environment": {"name": "host"}}, "have turns"),
        (
            {
                "reference": {"distillation": 1.0},
                "loop": {"filter": "none"},
                "algorithm": {"objective": "package.module:loss"},
            },
            "leave either out",
        ),
    ],
)
def test_what_cannot_act_is_refused_in_a_sentence(tree: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_config(tree)
