"""The real vLLM engine goes on from another one's tokens as if it had sampled them itself."""

import gc
import string
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from antiphon.api.engine import EngineOutput, EngineProgress, EngineRequest
from antiphon.core.drafting.config import DraftingSection
from antiphon.core.errors import ContractError
from antiphon.core.records import FinishReason, SamplingParameters, VersionSpan
from antiphon.weights.snapshot import verify, weights_digest
from tests.services.rollout.test_vllm_engine import VOCABULARY, make_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: take the cpu or cuda variant"
    ),
]

SEED = 20_260_501
COUNT, MAX_TOKENS, GROUP = 24, 48, 4
WAYS = (
    SamplingParameters(max_tokens=MAX_TOKENS),
    SamplingParameters(temperature=0.7, top_k=20, max_tokens=MAX_TOKENS),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("continuation")
    for version in (0, 1):
        make_model(folder / str(version), seed=version)
    return [folder / "0", folder / "1"]


@pytest.fixture(scope="module")
def weights(folders):
    from safetensors.torch import load_file

    return [load_file(folder / "model.safetensors") for folder in folders]


@pytest.fixture(scope="module", params=[0, 6], ids=["plain", "drafting"])
def engine(request, folders):
    from antiphon.services.rollout.engine.environment import EngineSettings
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    started = VllmEngine(
        EngineSettings(
            model_dir=folders[0],
            max_model_len=128,
            max_num_seqs=COUNT,
            kv_cache_bytes=8 << 20,
            draft_tokens=request.param,
            drafting=DraftingSection(probe_steps=16),
        )
    )
    yield started
    started.close()
    gc.collect()


def requests() -> list[EngineRequest]:
    """Return groups of one prompt each; a drafting engine drafts siblings from one another."""
    print(f"seed={SEED}")
    chance = np.random.default_rng(SEED)
    prompts = [
        tuple(int(t) for t in chance.integers(3, VOCABULARY, 4 + 5 * i)) for i in range(COUNT // GROUP)
    ]
    return [
        EngineRequest(
            f"r{i}",
            prompts[i // GROUP],
            int(chance.integers(2**64, dtype=np.uint64)),
            WAYS[i % 2],
            group=str(i // GROUP),
        )
        for i in range(COUNT)
    ]


def load(engine, weights, version: int) -> None:
    engine.load_weights(version, verify(weights[version]), weights_digest(weights[version]))


def run(engine, batch: list[EngineRequest]) -> dict[str, EngineOutput]:
    engine.add(batch)
    outputs: dict[str, EngineOutput] = {}
    while engine.unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def begin(engine, batch: list[EngineRequest], steps: int) -> dict[str, EngineProgress]:
    """Sample for some steps, then lose the engine's requests as a reclaimed machine would."""
    engine.add(batch)
    for _ in range(steps):
        engine.step()
    names = {request.request_id: 0 for request in batch}
    found = {progress.request_id: progress for progress in engine.progress(names)}
    engine.abort(list(names))
    assert engine.unfinished == 0
    return found


def after(batch: list[EngineRequest], begun: dict[str, EngineProgress]) -> list[EngineRequest]:
    return [
        replace(request, prefix_token_ids=tuple(begun[request.request_id].token_ids.tolist()))
        for request in batch
        if request.request_id in begun
    ]


@pytest.mark.parametrize("steps", [1, 7, 23])
def test_a_lost_completion_is_continued_bit_for_bit(engine, weights, steps: int) -> None:
    load(engine, weights, 0)
    whole = run(engine, requests())
    begun = begin(engine, requests(), steps)
    assert len(begun) >= COUNT // 3
    rest = run(engine, after(requests(), begun))
    for name, half in begun.items():
        joined = np.concatenate([half.token_ids, rest[name].token_ids])
        assert joined.tolist() == whole[name].token_ids.tolist()
        logprobs = np.concatenate([half.logprobs, rest[name].logprobs])
        assert logprobs.tobytes() == whole[name].logprobs.tobytes()
        assert rest[name].finish_reason is whole[name].finish_reason
        assert half.spans == (VersionSpan(0, 0, len(half.token_ids)),)
        assert rest[name].spans == (VersionSpan(0, 0, len(rest[name].token_ids)),)
        if rest[name].drafting is not None:
            assert rest[name].drafting.tokens == len(rest[name].token_ids)


def test_progress_tells_what_is_new_and_spans_say_under_which_version(engine, weights) -> None:
    load(engine, weights, 0)
    batch = [replace(request, sampling=replace(WAYS[0], temperature=1.0)) for request in requests()]
    engine.add(batch)
    names = {request.request_id: 0 for request in batch}
    for _ in range(3):
        engine.step()
    first = {p.request_id: p for p in engine.progress(names)}
    load(engine, weights, 1)
    for _ in range(4):
        engine.step()
    second = {p.request_id: p for p in engine.progress({name: len(p.token_ids) for name, p in first.items()})}
    again = {p.request_id: p for p in engine.progress(names)}
    engine.abort(list(names))
    assert second
    for name, news in second.items():
        before = first[name]
        assert news.start == len(before.token_ids) and len(news.token_ids) >= 1
        assert again[name].token_ids.tolist() == [*before.token_ids.tolist(), *news.token_ids.tolist()]
        assert again[name].spans == (
            VersionSpan(0, 0, news.start),
            VersionSpan(1, news.start, len(again[name].token_ids)),
        )
        assert news.spans == again[name].spans[1:]
    assert engine.progress({**names, "unknown": 0}) == []


def test_a_text_that_stops_ends_a_turn_with_the_token_that_completes_it(engine, folders, weights) -> None:
    """Wherever a hand-over cuts it, and however many drafts behind it are right."""
    signs = string.ascii_letters + string.digits + "+-"
    words = {sign: index for index, sign in enumerate(signs)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=signs[0]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folders[0] / "tokenizer.json"))
    load(engine, weights, 0)
    whole = run(engine, requests())
    texts = {name: "".join(signs[token] for token in one.token_ids) for name, one in whole.items()}
    stop = (texts["r0"][8:10], texts["r5"][5:8])

    def end(name: str, begin: int = 0) -> int | None:
        ends = (texts[name].find(one, begin) + len(one) for one in stop if one in texts[name][begin:])
        return min(ends, default=None)

    def script(name: str, so_far: list[int]) -> list[int]:
        return whole[name].token_ids[len(so_far) :].tolist()

    stopped = [replace(one, sampling=replace(one.sampling, stop=stop)) for one in requests()]
    ends = {one.request_id: end(one.request_id) for one in stopped}
    assert len(stopped) > sum(found is not None for found in ends.values()) >= 2
    drafting = engine.scripted_drafts(script) if engine.scheduler is not None else nullcontext()
    with drafting:
        found = run(engine, stopped)
    for name, size in ends.items():
        assert found[name].token_ids.tolist() == whole[name].token_ids[:size].tolist()
        assert found[name].logprobs.tobytes() == whole[name].logprobs[:size].tobytes()
        assert found[name].finish_reason is (FinishReason.STOP if size else whole[name].finish_reason)
    cut = ends["r0"]
    assert cut is not None
    within = replace(stopped[0], prefix_token_ids=tuple(whole["r0"].token_ids[: cut - 1].tolist()))
    assert run(engine, [within])["r0"].token_ids.tolist() == [whole["r0"].token_ids[cut - 1]]
    # What stands in an earlier turn is no part of this one's text.
    (later,) = run(engine, [replace(within, turn_begin=cut - 1)]).values()
    assert cut - 1 + len(later.token_ids) == (end("r0", cut - 1) or len(whole["r0"].token_ids))


def test_a_prefix_that_cannot_be_is_refused(engine, weights) -> None:
    load(engine, weights, 0)
    one = requests()[0]
    with pytest.raises(ContractError, match="token ids"):
        engine.add([replace(one, prefix_token_ids=(VOCABULARY,))])
    with pytest.raises(ContractError, match="leaves none to sample"):
        engine.add([replace(one, prefix_token_ids=(3,) * MAX_TOKENS)])
    assert engine.unfinished == 0
