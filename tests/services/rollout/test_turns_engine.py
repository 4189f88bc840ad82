"""The real vLLM engine goes on behind an environment's answer, with the same bits with and without helps."""

import asyncio
import gc
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from antiphon.api.engine import EngineRequest
from antiphon.core.drafting.config import DraftingSection
from antiphon.core.records import Lease, SamplingParameters, TurnLimits
from antiphon.core.requests import TurnReply
from antiphon.core.seeds import branch_seed
from antiphon.core.spans import joined, shifted
from antiphon.services.rollout.work import GroupInFlight, WorkInFlight, piece_of
from antiphon.system.wakeup import Wakeup
from antiphon.weights.snapshot import verify, weights_digest
from tests.services.rollout.test_vllm_engine import VOCABULARY, make_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: take the cpu or cuda variant"
    ),
]

SEED = 20_261_127
ROWS, GROUP, TURNS, TURN_TOKENS = 12, 4, 4, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("turns")
    make_model(folder, seed=0)
    return folder


def open_engine(folder, draft_tokens: int, prefix_caching: bool):
    from antiphon.services.rollout.engine.environment import EngineSettings
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    return VllmEngine(
        EngineSettings(
            model_dir=folder,
            max_model_len=192,
            max_num_seqs=ROWS,
            kv_cache_bytes=8 << 20,
            draft_tokens=draft_tokens,
            drafting=DraftingSection(probe_steps=16),
            prefix_caching=prefix_caching,
        )
    )


def converse(engine, folder) -> dict[str, tuple[list[int], list[float]]]:
    """Play conversations of several turns whose environment says random tokens; return what was sampled."""
    from safetensors.torch import load_file

    print(f"seed={SEED}")
    tensors = load_file(folder / "model.safetensors")
    engine.load_weights(0, verify(tensors), weights_digest(tensors))
    chance = np.random.default_rng(SEED)
    prompts = [
        tuple(int(t) for t in chance.integers(3, VOCABULARY, 4 + 40 * i)) for i in range(ROWS // GROUP)
    ]
    answers = chance.integers(3, VOCABULARY, (ROWS, TURNS, 7))
    waiting = [
        EngineRequest(
            f"r{i}",
            prompts[i // GROUP],
            int(chance.integers(2**64, dtype=np.uint64)),
            SamplingParameters(max_tokens=TURN_TOKENS),
            group=str(i // GROUP),
        )
        for i in range(ROWS)
    ]
    sampled: dict[str, tuple[list[int], list[float]]] = {one.request_id: ([], []) for one in waiting}
    requests, turns = {one.request_id: one for one in waiting}, dict.fromkeys(sampled, 0)
    engine.add(waiting)
    while engine.unfinished:
        for output in engine.step():
            name, request = output.request_id, requests[output.request_id]
            sampled[name][0].extend(output.token_ids.tolist())
            sampled[name][1].extend(output.logprobs.tolist())
            turns[name] += 1
            if turns[name] < TURNS:
                said = answers[int(name[1:]), turns[name]].tolist()
                row = (*request.prefix_token_ids, *output.token_ids.tolist(), *said)
                sampling = replace(request.sampling, max_tokens=len(row) + TURN_TOKENS)
                requests[name] = replace(request, prefix_token_ids=row, sampling=sampling)
                engine.add([requests[name]])
    return sampled


def test_turns_have_the_same_bits_with_drafts_and_kept_prefixes(folder) -> None:
    found = {}
    for drafts, caching in ((0, False), (0, True), (6, True)):
        engine = open_engine(folder, drafts, caching)
        try:
            found[drafts, caching] = converse(engine, folder)
        finally:
            engine.close()
            gc.collect()
    plain = found[0, False]
    assert sum(len(tokens) for tokens, _ in plain.values()) > ROWS * TURNS
    assert found[0, True] == plain
    assert found[6, True] == plain


def test_a_branch_goes_on_as_a_request_of_its_own_would(folder) -> None:
    """Only what stands behind the break counts: the tokens, their positions, the seed of the branch."""
    from safetensors.torch import load_file

    print(f"seed={SEED}")
    chance = np.random.default_rng(SEED)
    tensors = load_file(folder / "model.safetensors")
    seeds = tuple(int(seed) for seed in chance.integers(2**64, size=GROUP, dtype=np.uint64))
    lease = Lease(
        lease_id="1" * 32,
        group_id="g0",
        prompt_key="p",
        prompt_token_ids=(),
        epoch=0,
        seeds=seeds,
        sampling=SamplingParameters(max_tokens=TURN_TOKENS),
        version=0,
        duration_s=60.0,
        attempt=1,
        limits=TurnLimits(8, 600, 192),
    )
    said = [chance.integers(3, VOCABULARY, size).tolist() for size in (30, 7, 150)]
    engine = open_engine(folder, 0, True)
    try:
        engine.load_weights(0, verify(tensors), weights_digest(tensors))
        group = GroupInFlight(lease, 0.0, {})
        found = []
        for turn, tokens in enumerate([said[0], said[1], said[2], said[1]]):
            for index in range(GROUP):
                group.answered(index, TurnReply(True, tuple(tokens), fresh=turn == 2), 0.0)
            requests = [group.request(index) for index in range(GROUP)]
            alone = []
            for index, request in enumerate(requests):
                row = group.prefixes[index]
                context = row.token_ids[row.breaks[-1] if row.breaks else 0 :].tolist()
                most = len(request.prompt_token_ids) + request.sampling.max_tokens - len(context)
                sampling = replace(request.sampling, max_tokens=most)
                seed = branch_seed(seeds[index], len(row.breaks))
                alone.append(EngineRequest(f"alone-{index}", tuple(context), seed, sampling))
                assert most == TURN_TOKENS or len(context) + most == 192
            engine.add([*requests, *alone])
            ended = {}
            while engine.unfinished:
                ended |= {output.request_id: output for output in engine.step()}
            for index, request in enumerate(requests):
                ours, theirs = ended[request.request_id], ended[f"alone-{index}"]
                assert ours.token_ids.tolist() == theirs.token_ids.tolist()
                assert ours.logprobs.tobytes() == theirs.logprobs.tobytes()
                row = group.prefixes[index]
                group.waiting[index] = joined(
                    [row, piece_of(replace(ours, spans=shifted(ours.spans, row.stop)), index)]
                )
                found.append(ours.token_ids.tolist())
        assert max(map(len, found)) == TURN_TOKENS and len({*map(tuple, found)}) > GROUP
    finally:
        engine.close()
        gc.collect()


def test_the_check_at_the_start_finds_kept_prefixes_that_change_bits(folder, monkeypatch) -> None:
    from antiphon.services.rollout.selfcheck import startup_check

    sound = startup_check._continued

    def disturbed(engine, requests, whole):
        for cache in engine._runner.kv_caches:
            cache.mul_(1.01)
        return sound(engine, requests, whole)

    engine = open_engine(folder, 0, True)
    try:
        assert startup_check.run_startup_check(engine, draws=200).keeps_prefixes
        monkeypatch.setattr(startup_check, "_continued", disturbed)
        assert not startup_check.run_startup_check(engine, draws=200).keeps_prefixes
    finally:
        engine.close()
        gc.collect()


@pytest.mark.parametrize("caching", [True, False])
def test_the_second_request_of_a_prompt_tells_what_was_cached(folder, caching: bool) -> None:
    """Of whole blocks, and never the prompt's last token, whose logits are needed."""
    from safetensors.torch import load_file

    print(f"seed={SEED}")
    chance = np.random.default_rng(SEED)
    prompt = tuple(int(t) for t in chance.integers(3, VOCABULARY, 100))
    tensors = load_file(folder / "model.safetensors")
    engine = open_engine(folder, 0, caching)

    def told(name: str, tokens: tuple[int, ...]) -> int:
        seeds = tuple(int(seed) for seed in chance.integers(2**64, size=GROUP, dtype=np.uint64))
        sampling = SamplingParameters(max_tokens=TURN_TOKENS)
        lease = Lease(name * 32, "g0", "p", tokens, 0, seeds, sampling, 0, 60.0, 1)
        work = WorkInFlight(Wakeup())
        work.groups[lease.lease_id] = group = GroupInFlight(lease, 0.0, {})

        async def sample() -> None:
            engine.add([group.request(index) for index in range(GROUP)])
            while engine.unfinished:
                work.collect(engine.step())

        asyncio.run(sample())
        return work.finished[lease.lease_id].cached_tokens

    try:
        engine.load_weights(0, verify(tensors), weights_digest(tensors))
        found = [told(name, tokens) for name, tokens in (("1", prompt), ("2", prompt), ("3", prompt[:40]))]
        engine.load_weights(1, verify(tensors), weights_digest(tensors))
        found.append(told("4", prompt))
    finally:
        engine.close()
        gc.collect()
    assert found == ([0, 96, 32, 0] if caching else [0] * 4)
