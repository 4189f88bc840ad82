"""The chain model says what it samples: its distribution is exact, and greedy recites the chain."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.benchmarks.parts.drafting.chain_model import (
    END,
    EPSILON,
    RESERVED,
    SHORTEST_CHAIN,
    ChainModel,
    build_chain_model,
)
from antiphon.core.errors import ConfigError


@pytest.fixture(scope="module")
def small() -> ChainModel:
    return build_chain_model(vocabulary=256, prompts=6, scale=12.0, hidden=64, layers=2)


def exact_distribution(model: ChainModel, token: int, temperature: float = 1.0) -> npt.NDArray[np.float64]:
    """Return the probabilities [V] of the token after `token`, computed in float64."""
    x = model.embeddings[token].astype(np.float64)
    logits = model.head.astype(np.float64) @ (x / np.sqrt(np.mean(x * x) + EPSILON))
    if temperature == 0:
        return np.eye(1, model.vocabulary, int(logits.argmax()), dtype=np.float64).reshape(-1)
    p = np.exp((logits - logits.max()) / temperature)
    return np.asarray(p / p.sum())


def test_the_written_model_has_the_distribution(small: ChainModel, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(small.save(tmp_path), dtype=torch.float32)
    tokens = [*small.prompt(2), *small.chains[2][:5], 200, *small.chains[4][-2:]]
    with torch.no_grad():
        logits = loaded.eval()(torch.tensor([tokens])).logits[0].double()
    for temperature in (0.7, 1.0, 1.5):
        found = (logits / temperature).softmax(-1).numpy()
        exact = np.stack([exact_distribution(small, token, temperature) for token in tokens])
        assert np.abs(found - exact).max() < 1e-5
    assert loaded.generation_config.eos_token_id == END


@settings(max_examples=25)
@given(
    prompts=st.integers(1, 12),
    spare=st.integers(0, 600),
    seed=st.integers(0, 2**31),
)
def test_greedy_recites_disjoint_chains_of_any_size(prompts: int, spare: int, seed: int) -> None:
    vocabulary = RESERVED + prompts * (1 + SHORTEST_CHAIN) + spare
    model = build_chain_model(vocabulary, prompts, hidden=128, seed=seed)
    used = [token for chain in model.chains for token in chain]
    assert len(set(used)) == len(used) and len(model.chains) == prompts
    assert min(used) == RESERVED + prompts and max(used) < model.vocabulary == vocabulary
    for index in (0, prompts - 1):
        token, said = model.prompt(index)[-1], []
        while token != END and len(said) <= len(used):
            token = int(exact_distribution(model, token, 0.0).argmax())
            said.append(token)
        assert tuple(said) == model.greedy(index)


def test_the_scale_sets_how_often_a_chain_goes_on() -> None:
    going_on = []
    for scale in (9.0, 14.0):
        model = build_chain_model(vocabulary=2048, prompts=16, scale=scale)
        chain = model.chains[3]
        p = exact_distribution(model, chain[0])
        assert p.sum() == pytest.approx(1.0) and (p > 0).all()
        going_on.append(p[chain[1]])
    assert going_on[0] < 0.9 < going_on[1]


def test_equal_seeds_make_equal_models() -> None:
    first, second, other = (build_chain_model(256, 4, hidden=64, seed=s) for s in (1, 1, 2))
    assert first.head.tobytes() == second.head.tobytes() != other.head.tobytes()
    assert first.chains == second.chains


def test_the_impossible_is_refused_in_words(small: ChainModel) -> None:
    with pytest.raises(ConfigError, match="no room for 60 chains"):
        build_chain_model(vocabulary=256, prompts=60)
