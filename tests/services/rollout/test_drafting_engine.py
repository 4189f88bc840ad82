"""Drafts on the real vLLM engine: none changes a token, the distribution or a log-probability."""

import gc
import inspect
from dataclasses import replace
from importlib.util import find_spec
from math import erfc, sqrt

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from antiphon.api.engine import EngineRequest
from antiphon.core.drafting.gate import StepPlan
from antiphon.core.errors import ConfigError
from antiphon.core.records import FinishReason, PastCompletion, PromptHistory, SamplingParameters
from antiphon.core.seeds import derive_seed
from antiphon.cpu.compiler import why_not_compiling
from antiphon.sampling import keyed_sampler as ks
from antiphon.sampling.rules import RULES
from antiphon.services.rollout.engine import sampler_hook
from antiphon.services.rollout.selfcheck.distribution_check import (
    PreferredFirst,
    chi_square_z,
    processed,
    run_to_end,
)
from antiphon.services.rollout.selfcheck.draft_check import compare
from antiphon.weights.snapshot import verify, weights_digest
from tests.benchmarks.test_chain_model import exact_distribution

COMPILES = pytest.mark.skipif(
    why_not_compiling() is not None, reason=f"the native sampler is compiled: {why_not_compiling()}"
)
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: take the cpu or cuda variant"
    ),
]

SEED = 20_260_403
VOCABULARY, END, MAX_LEN, SEQUENCES, WINDOW = 64, 1, 96, 64, 6
CONCURRENCY = {1: (8, 8, 8), 8: (96, 96, 96), 64: (230, 229, 229)}
"""Requests at each concurrency, for temperature 0, 0.7 and 1: a thousand in all."""
STATES = 24


def make_model(folder):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True,
        max_position_embeddings=256, bos_token_id=2, eos_token_id=END, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)  # far from uniform, so that distributions can be told apart
    model.save_pretrained(folder)
    return model


def start(folder, **changes):
    from safetensors.torch import load_file

    from antiphon.services.rollout.engine.environment import EngineSettings
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    settings = {"max_model_len": MAX_LEN, "max_num_seqs": SEQUENCES, "kv_cache_bytes": 32 << 20, **changes}
    engine = VllmEngine(EngineSettings(model_dir=folder, **settings))
    weights = load_file(folder / "model.safetensors")
    if changes.get("dtype") == "bfloat16":
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    engine.load_weights(0, verify(weights), weights_digest(weights))
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drafting") / "model"


@pytest.fixture(scope="module")
def model(folder):
    print(f"seed={SEED}")
    return make_model(folder)


def requests() -> list[EngineRequest]:
    """Return a thousand requests: prompts that recur, three temperatures, some with top-k and top-p."""
    chance = np.random.default_rng(SEED)
    prompts = [tuple(int(t) for t in chance.integers(3, VOCABULARY, 2 + i % 30)) for i in range(50)]
    made = []
    for counts in CONCURRENCY.values():
        for temperature, count in zip((0.0, 0.7, 1.0), counts, strict=True):
            for _ in range(count):
                index = len(made)
                cut = {"top_k": 12, "top_p": 0.9} if temperature and index % 4 == 0 else {}
                sampling = SamplingParameters(temperature=temperature, max_tokens=20, **cut)
                made.append(
                    EngineRequest(f"r{index}", prompts[index % 50], derive_seed(SEED, index), sampling)
                )
    return made


def by_concurrency(batch):
    """Yield (concurrency, requests to run at once)."""
    at = 0
    for concurrency, counts in CONCURRENCY.items():
        for first in range(at, at + sum(counts), concurrency):
            yield concurrency, batch[first : min(first + concurrency, at + sum(counts))]
        at += sum(counts)


@pytest.fixture(scope="module")
def plain(folder, model):
    """The answers of an engine that knows nothing of drafts, each request alone or in its batch."""
    engine = start(folder)
    assert not engine.drafts and engine.scheduler is None
    with pytest.raises(ConfigError, match="draft_tokens"), engine.scripted_drafts(lambda *_: []):
        pass
    outputs = {}
    for _, part in by_concurrency(requests()):
        outputs |= {o.request_id: o for o in run_to_end(engine, part)}
    engine.close()
    gc.collect()
    return outputs


@pytest.fixture(scope="module")
def drafting(folder, model, plain):
    engine = start(folder, draft_tokens=WINDOW)
    yield engine
    engine.close()
    gc.collect()


@pytest.fixture
def engine(drafting):
    drafting.abort([r.request_id for r in requests()])  # whatever a failed test left behind
    drafting.use_drafts(True)
    return drafting


def texts_for(plain, kind: str) -> dict[str, list[int]]:
    """Return what each request's drafts are read from: right, corrupted, senseless, or a mixture."""
    chance = np.random.default_rng(SEED + 1)
    texts = {}
    for index, (request_id, output) in enumerate(plain.items()):
        right, size = output.token_ids, len(output.token_ids)
        noise = chance.integers(VOCABULARY, size=size + WINDOW)
        share = {"right": 0.0, "corrupted": 0.3, "nonsense": 1.0, "mixed": (0.0, 0.3, 1.0)[index % 3]}[kind]
        wrong = chance.random(size) < share
        texts[request_id] = [*np.where(wrong, noise[:size], right).tolist(), *noise.tolist()]
    return texts


def follow(texts):
    return lambda request_id, so_far: texts[request_id][
        len(so_far) : len(so_far) + 1 + int(request_id[1:]) % WINDOW
    ]


def totals(outputs) -> tuple[int, int]:
    return sum(o.drafting.drafted for o in outputs), sum(o.drafting.accepted for o in outputs)


def test_a_thousand_requests_are_identical_whatever_is_drafted(engine, plain, model):
    batch, drafted = requests(), []
    assert len(batch) == 1000
    with engine.scripted_drafts(follow(texts_for(plain, "mixed"))):
        for _, part in by_concurrency(batch):
            drafted += run_to_end(engine, part)
    check = compare([plain[o.request_id] for o in drafted], drafted)
    proposed, accepted = totals(drafted)
    print(
        f"seed={SEED} identical={check.requests - check.flipped}/{check.requests} bits={check.bits_equal} "
        f"logprob_difference={check.logprob_difference:.1e} drafted={proposed} accepted={accepted}"
    )
    assert check.flipped == 0 and check.logprob_difference < 1e-5
    assert accepted > 5000 and proposed > accepted + 5000
    assert max(
        float(np.abs(o.logprobs - torch_logprobs(model, r, o.token_ids)).max())
        for r, o in zip(batch[::5], drafted[::5], strict=True)
    ) < 1e-5  # fmt: skip


@torch.no_grad()
def torch_logprobs(model, request: EngineRequest, token_ids) -> np.ndarray:
    """Return the log-probabilities that one forward pass in torch gives to a completion, processed."""
    prompt = list(request.prompt_token_ids)
    logits = model(torch.tensor([prompt + token_ids.tolist()])).logits[0, len(prompt) - 1 : -1]
    sampling = request.sampling
    if sampling.temperature == 0.0:
        sampling = SamplingParameters()
    rows = [processed(row, sampling) for row in logits.double().log_softmax(-1).numpy()]
    return np.log([row[token] for row, token in zip(rows, token_ids, strict=True)])


@pytest.mark.parametrize("kind", ["right", "corrupted", "nonsense"])
def test_each_kind_of_draft_alone(engine, plain, kind):
    batch = requests()[-64:]
    with engine.scripted_drafts(follow(texts_for(plain, kind))):
        drafted = run_to_end(engine, batch)
    check = compare([plain[o.request_id] for o in drafted], drafted)
    assert check.flipped == 0 and check.logprob_difference < 1e-5
    proposed, accepted = totals(drafted)
    if kind == "right":  # what lies behind the end of an answer is drafted in vain
        assert accepted >= 0.9 * proposed
        assert sum(o.drafting.passes for o in drafted) < 0.5 * sum(len(o.token_ids) for o in drafted)
    else:
        assert accepted < (0.8 if kind == "corrupted" else 0.3) * proposed


def test_stop_tokens_of_a_request_end_it_also_within_drafts(engine, plain):
    batch = requests()[-64:]
    stops = {
        r.request_id: plain[r.request_id].token_ids[len(plain[r.request_id].token_ids) // 2] for r in batch
    }
    with_stops = [
        replace(r, sampling=replace(r.sampling, stop_token_ids=(VOCABULARY - 1, int(stops[r.request_id]))))
        for r in batch
    ]
    for drafts in (True, False):
        texts = texts_for(plain, "right") if drafts else dict.fromkeys(plain, ())
        with engine.scripted_drafts(follow(texts)):
            ended = run_to_end(engine, with_stops)
        for request, output in zip(with_stops, ended, strict=True):
            whole = plain[request.request_id]
            among = np.isin(whole.token_ids, [END, *request.sampling.stop_token_ids])
            count = int(np.flatnonzero(among)[0]) + 1
            assert output.token_ids.tolist() == whole.token_ids[:count].tolist()
            assert np.abs(output.logprobs - whole.logprobs[:count]).max() < 1e-5
            assert output.finish_reason is FinishReason.STOP
        assert (totals(ended)[1] > 100) is drafts


def with_history(batch, completions) -> list[EngineRequest]:
    """Return the requests as groups by prompt, with `completions(prompt)` as their history."""
    names = {prompt: f"g{i}" for i, prompt in enumerate({r.prompt_token_ids for r in batch})}
    made = []
    for r in batch:
        past = tuple(PastCompletion(np.asarray(ids, np.int32), 0, 0, i, 1.0)
                     for i, ids in enumerate(completions(r.prompt_token_ids)))  # fmt: skip
        history = PromptHistory(names[r.prompt_token_ids], 0, past)
        made.append(EngineRequest(r.request_id, r.prompt_token_ids, r.seed, r.sampling,
                                  group=names[r.prompt_token_ids], history=history))  # fmt: skip
    return made


def test_a_thousand_requests_with_corrupted_histories_and_siblings(engine, plain):
    batch, texts = requests(), texts_for(plain, "mixed")
    answers = {}
    for r in batch:
        answers.setdefault(r.prompt_token_ids, []).append(
            texts[r.request_id][: len(plain[r.request_id].token_ids)]
        )
    drafted = []
    for _, part in by_concurrency(with_history(batch, lambda prompt: answers[prompt][:8])):
        drafted += run_to_end(engine, part)
    check = compare([plain[o.request_id] for o in drafted], drafted)
    proposed, accepted = totals(drafted)
    print(f"history: drafted={proposed} accepted={accepted} bits={check.bits_equal}")
    assert check.flipped == 0 and check.logprob_difference < 1e-5
    assert engine.drafts and accepted > 0
    assert all(o.drafting.with_history for o in drafted)


LYING = {
    "another vocabulary": lambda prompt: [[VOCABULARY + 5, 10**6, 2**31 - 1, -4] * 8],
    "half another vocabulary": lambda prompt: [[3, 4, VOCABULARY, 5, 6] * 6],
    "empty": lambda prompt: [[], []],
    "none": lambda prompt: [],
    "huge": lambda prompt: [np.arange(300_000) % VOCABULARY],
    "one token for ever": lambda prompt: [[7] * 5000],
    "the prompt itself": lambda prompt: [list(prompt) * 3],
    "many": lambda prompt: [np.roll(np.arange(40), i) for i in range(300)],
}


@pytest.mark.parametrize("lie", LYING)
def test_a_history_that_lies_changes_nothing(engine, plain, lie):
    with capture_logs() as logs:
        drafted = run_to_end(engine, with_history(requests()[:72:2], LYING[lie]))
    check = compare([plain[o.request_id] for o in drafted], drafted)
    assert check.flipped == 0 and check.logprob_difference < 1e-5
    assert engine.drafts and not [entry for entry in logs if entry["event"] == "drafting.off"]


BREAKABLE = [
    "_forest.draft",
    "_forest.learn",
    "_forest.open_group",
    "_forest.close_request",
    "_windows.limits",
    "_gate.observe",
]


@pytest.mark.parametrize("part", BREAKABLE)
def test_a_broken_drafter_disables_itself_with_one_line_and_the_run_goes_on(engine, plain, monkeypatch, part):
    def fail(*_, **__):
        raise ZeroDivisionError("a drafter with a fault")

    batch = requests()[-64:]
    answers = {r.prompt_token_ids: plain[r.request_id].token_ids for r in batch}
    holder, _, name = part.partition(".")
    # Whether drafts pay is for the clock to say; here every part of the drafter must be reached.
    monkeypatch.setattr(engine.scheduler._gate, "plan", lambda requests: StepPlan(draft=True, floor=0.0))
    monkeypatch.setattr(getattr(engine.scheduler, holder), name, fail)
    with capture_logs() as logs:
        drafted = run_to_end(engine, with_history(batch, lambda prompt: [answers[prompt]]))
        drafted += run_to_end(engine, with_history(batch, lambda prompt: [answers[prompt]]))
    assert compare([plain[o.request_id] for o in drafted], drafted).flipped == 0
    off = [entry for entry in logs if entry["event"] == "drafting.off"]
    assert len(off) == 1 and "a drafter with a fault" in off[0]["reason"]
    assert not engine.drafts and engine.unfinished == 0
    monkeypatch.undo()
    engine.use_drafts(True)
    with engine.scripted_drafts(follow(texts_for(plain, "right"))):
        again = run_to_end(engine, batch)
    assert compare([plain[o.request_id] for o in again], again).flipped == 0 and totals(again)[1] > 0


def test_prompts_of_one_token_may_join_while_others_draft(engine, plain):
    batch = requests()[:40]
    short = [EngineRequest(f"s{i}", (3 + i,), i, SamplingParameters(max_tokens=12)) for i in range(20)]
    engine.use_drafts(False)
    alone = {o.request_id: o for o in run_to_end(engine, short)}
    engine.use_drafts(True)
    texts = texts_for({**plain, **alone}, "right")
    outputs, waiting = {}, list(short)
    with engine.scripted_drafts(follow(texts)):
        engine.add(batch)
        while engine.unfinished:
            outputs |= {o.request_id: o for o in engine.step()}
            if waiting:
                engine.add([waiting.pop()])
    assert len(outputs) == 60
    assert compare([{**plain, **alone}[i] for i in outputs], list(outputs.values())).flipped == 0


def test_drafts_cannot_be_switched_in_mid_air(engine):
    engine.add(requests()[:1])
    with pytest.raises(ConfigError, match="in flight"):
        engine.use_drafts(False)
    engine.abort(["r0"])
    engine.use_drafts(False)
    assert not engine.drafts


def test_the_startup_check_holds_on_a_sound_engine(engine):
    from antiphon.services.rollout.selfcheck.startup_check import run_startup_check

    report = run_startup_check(engine, draws=600)
    assert report.distributions_hold and report.drafts is not None and engine.drafts
    assert report.drafts_hold(bits=False) and report.drafts_hold(bits=report.bits_equal)
    assert all(check.degrees > 3 and check.logprob_error < 1e-4 for check in report.drafts.distributions)
    assert report.drafts.identity.requests > 60 and report.drafts.accepted > 100


def test_the_startup_check_sees_drafts_that_are_waved_through(engine, monkeypatch):
    from antiphon.services.rollout.selfcheck.startup_check import run_startup_check

    def credulous(tokens, drafts, drafts_per_request):
        starts = np.cumsum(drafts_per_request + 1) - (drafts_per_request + 1)
        for start_, stop, first in zip(starts, np.cumsum(drafts_per_request), starts, strict=True):
            if stop > first - np.searchsorted(starts, first) and (tokens[start_] + len(drafts)) % 4 == 0:
                tokens = tokens.copy()
                tokens[start_] = drafts[start_ - np.searchsorted(starts, start_)]
        return ks.verify_chain(tokens, drafts, drafts_per_request)

    monkeypatch.setattr(sampler_hook, "verify_chain", credulous)
    report = run_startup_check(engine, draws=600)
    assert report.distributions_hold and not report.drafts_hold(bits=False)
    assert "do not follow" in report.drafts.why_not(bits=False)


def test_the_startup_check_sees_tokens_that_depend_on_drafts(engine, monkeypatch):
    from antiphon.services.rollout.selfcheck.startup_check import run_startup_check

    def moved(logits, keys, positions, rows):
        verifying = len(keys) != len(engine._hook.slots)
        return RULES["inverse_cdf"].draw(logits, keys, positions + (1 << 20 if verifying else 0), rows)

    monkeypatch.setattr(engine._hook, "_draw", moved)
    report = run_startup_check(engine, draws=600)
    assert report.distributions_hold and all(check.holds for check in report.drafts.distributions)
    assert "changed tokens in" in report.drafts.why_not(bits=False)


@COMPILES
def test_the_native_sampler_keeps_its_distribution_with_drafts(folder, model):
    from antiphon.services.rollout.selfcheck.startup_check import run_startup_check

    engine = start(folder, draft_tokens=WINDOW, sampler="native")
    report = run_startup_check(engine, draws=600)
    engine.close()
    assert report.drafts.identity is None and report.drafts_hold(bits=False)
    assert "native" in report.drafts.why_not(bits=True)


def test_flips_in_bfloat16_are_counted(folder, model):
    from antiphon.services.rollout.selfcheck.startup_check import run_startup_check

    engine = start(folder, draft_tokens=WINDOW, dtype="bfloat16")
    batch = requests()[-256:]
    engine.use_drafts(False)
    before = [o for at in range(0, 256, 64) for o in run_to_end(engine, batch[at : at + 64])]
    engine.use_drafts(True)
    with engine.scripted_drafts(follow(texts_for({o.request_id: o for o in before}, "mixed"))):
        after = [o for at in range(0, 256, 64) for o in run_to_end(engine, batch[at : at + 64])]
    report = run_startup_check(engine, draws=600)
    engine.close()
    print([check.words for check in report.distributions])
    assert report.distributions_hold  # rounding is no fault
    check = compare(before, after)
    tokens = sum(len(o.token_ids) for o in before)
    print(f"bfloat16: {check.flipped} of 256 requests flipped ({tokens} tokens), "
          f"logprob_difference={check.logprob_difference:.1e} bits={check.bits_equal}")  # fmt: skip
    assert check.flipped <= 64 and totals(after)[1] > 0


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A model whose next token depends on the last one alone, and an engine that never ends a completion."""
    from antiphon.benchmarks.parts.drafting.chain_model import ChainModel

    chance = np.random.default_rng(SEED)
    embeddings = chance.standard_normal((STATES, 64)).astype(np.float32)
    head = (chance.standard_normal((STATES, 64)) * 0.16).astype(np.float32)
    chain = ChainModel(embeddings, head, ((4,),), layers=1)
    folder = chain.save(tmp_path_factory.mktemp("known") / "model")
    engine = start(folder, draft_tokens=WINDOW, max_num_seqs=128, stop_token_ids=())
    yield chain, engine
    engine.close()
    gc.collect()


CASES = {"T=1": {}, "T=0.7": {"temperature": 0.7}, "top": {"temperature": 1.2, "top_k": 9, "top_p": 0.85}}
LONG, BATCH = 44, 128


def sample_known(engine, case: str, length: int, count: int, kind: str) -> tuple[np.ndarray, list]:
    """Return tokens [count, length] drawn after one prompt token, with drafts of every kind."""
    sampling = SamplingParameters(**CASES[case], max_tokens=length)
    batch = [EngineRequest(f"k{i}", (5,), derive_seed(SEED, kind, case, i), sampling) for i in range(count)]
    engine.use_drafts(False)
    right = {o.request_id: o for o in run_to_end(engine, batch)} if kind == "long" else {}
    engine.use_drafts(True)
    noise = np.random.default_rng(SEED + 2).integers(STATES, size=(count, length + WINDOW)).tolist()
    texts = texts_for(right, "mixed") if right else {f"k{i}": noise[i] for i in range(count)}
    with engine.scripted_drafts(follow({k: [t % STATES for t in v] for k, v in texts.items()})):
        outputs = run_to_end(engine, batch)
    assert totals(outputs)[1] > 0
    return np.array([o.token_ids for o in outputs]), outputs


def p_value(z: float) -> float:
    return 0.5 * erfc(z / sqrt(2))


@pytest.fixture(scope="module")
def drawn(known):
    """Every case's tokens, log-probabilities and places on the unit interval; 50,688 samples and more."""
    chain, engine = known
    found = {}
    for case, sampling in CASES.items():
        parameters = SamplingParameters(**sampling)
        logprobs = [np.log(exact_distribution(chain, token)) for token in range(STATES)]
        exact = np.array([processed(row, parameters) for row in logprobs])
        tokens, outputs = sample_known(engine, case, LONG, 3 * BATCH, "long")
        found[case] = exact, tokens, np.array([o.logprobs for o in outputs])
    total = sum(tokens.size for _, tokens, _ in found.values())
    print(f"seed={SEED} samples={total}")
    assert total >= 50_000
    return found


def assert_likely(zs: dict) -> None:
    """Bonferroni: the smallest p-value, times their number, stays above 0.01."""
    smallest = min(p_value(z) for z in zs.values())
    print(f"{len(zs)} tests, smallest p = {smallest:.3g}, corrected {smallest * len(zs):.3g}")
    assert smallest * len(zs) > 0.01, {k: round(z, 2) for k, z in zs.items() if p_value(z) < 0.01}


def test_drafted_tokens_follow_the_known_distribution_in_every_state(drawn):
    zs = {}
    for case, (exact, tokens, logprobs) in drawn.items():
        before = np.concatenate([np.full((len(tokens), 1), 5), tokens[:, :-1]], axis=1)
        p = exact[before, tokens]
        assert (p > 0).all()
        assert np.abs(logprobs - np.log(p)).max() < 1e-5
        for state in range(STATES):
            counts = np.bincount(tokens[before == state], minlength=STATES).astype(float)
            z, degrees = chi_square_z(counts, exact[state])
            if degrees:
                zs[case, state] = z
    assert len(zs) > 50
    assert_likely(zs)


def test_the_first_three_tokens_follow_the_known_distribution(known):
    chain, engine = known
    zs = {}
    for case, sampling in CASES.items():
        parameters = SamplingParameters(**sampling)
        logprobs = [np.log(exact_distribution(chain, token)) for token in range(STATES)]
        exact = np.array([processed(row, parameters) for row in logprobs])
        tokens, _ = sample_known(engine, case, 3, 16 * BATCH, "short")
        expected = exact[5]
        for position in range(3):
            zs[case, position] = chi_square_z(
                np.bincount(tokens[:, position], minlength=STATES).astype(float), expected
            )[0]
            expected = expected @ exact
    assert_likely(zs)


def test_positions_and_requests_are_independent(drawn):
    """The places of neighbours on the unit interval fill the unit square evenly."""
    zs, chance, side = {}, np.random.default_rng(SEED + 3), 8
    for case, (exact, tokens, _) in drawn.items():
        known = [PreferredFirst(row) for row in exact]
        before = np.concatenate([np.full((len(tokens), 1), 5), tokens[:, :-1]], axis=1)
        within = chance.random(tokens.shape)
        places = np.array([
            [known[b].point(int(t), 0, float(w)) for b, t, w in zip(*rows, strict=True)]
            for rows in zip(before.tolist(), tokens.tolist(), within, strict=True)
        ])  # fmt: skip
        cells = np.minimum((places * side).astype(int), side - 1)
        pairs = {
            "next position": (cells[:, :-1], cells[:, 1:]),
            "position after": (cells[:, :-2], cells[:, 2:]),
            "next request": (cells[:-1:2], cells[1::2]),
            "request a batch later": (cells[:-BATCH], cells[BATCH:]),
        }
        for name, (one, other) in pairs.items():
            counts = np.bincount((one * side + other).ravel(), minlength=side * side).astype(float)
            zs[case, name] = chi_square_z(counts, np.full(side * side, side**-2))[0]
    assert_likely(zs)


# What follows fails first when a new vLLM changes what the drafter and the sampler stand on.


def test_vllm_calls_the_drafter_as_agreed(engine, plain, monkeypatch):
    calls = []
    propose = engine._drafter.propose

    def record(*arguments, **options):
        calls.append((arguments, options))
        return propose(*arguments, **options)

    monkeypatch.setattr(engine._drafter, "propose", record)
    assert engine._runner.drafter is engine._drafter
    with engine.scripted_drafts(follow(texts_for(plain, "right"))):
        run_to_end(engine, requests()[:8])
    by_vllm = [(arguments, options) for arguments, options in calls if options]
    assert by_vllm, "vLLM asked for no drafts after a step that verified some"
    for (sampled, lengths, tokens), options in by_vllm:
        assert set(options) == {"slot_mappings"}
        assert isinstance(sampled, list) and all(isinstance(row, list) for row in sampled)
        assert lengths.dtype.kind == "i" and lengths.ndim == 1 and len(lengths) >= len(sampled)
        assert tokens.dtype == np.int32 and tokens.ndim == 2 and tokens.shape[1] >= MAX_LEN


def test_vllm_builds_the_drafter_as_agreed():
    from types import SimpleNamespace

    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    from antiphon.services.rollout.engine.sampler_hook import CLASS_PATH, HistoryDrafter

    assert list(inspect.signature(create_custom_proposer).parameters) == ["vllm_config"]
    speculation = SimpleNamespace(model=CLASS_PATH, num_speculative_tokens=3)
    made = create_custom_proposer(SimpleNamespace(speculative_config=speculation))
    assert isinstance(made, HistoryDrafter) and made.window == 3
    assert made.propose([[4], []], np.zeros(2), np.zeros((2, 4))) == [[], []]  # bound to nothing yet
    made.load_model(None)


def test_vllm_has_what_the_sampler_hook_takes_the_place_of(engine):
    from vllm.v1.outputs import DraftTokenIds, SamplerOutput
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert list(inspect.signature(GPUModelRunner._sample).parameters) == [
        "self", "logits", "spec_decode_metadata"
    ]  # fmt: skip
    assert {"draft_token_ids", "num_draft_tokens"} <= set(SpecDecodeMetadata.__annotations__)
    assert {"sampled_token_ids", "logprobs_tensors"} <= set(SamplerOutput.__annotations__)
    assert list(inspect.signature(DraftTokenIds).parameters) == ["req_ids", "draft_token_ids"]
    assert list(inspect.signature(rejection_sampler.expand_batch_to_tokens).parameters) == [
        "x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"
    ]  # fmt: skip
    assert rejection_sampler.MAX_SPEC_LEN >= 64  # drafting.max_window's own limit
    batch = engine._runner.input_batch
    rows, length = SEQUENCES, MAX_LEN + WINDOW
    assert isinstance(batch.req_ids, list) and batch.num_reqs == len(batch.req_ids)
    assert batch.token_ids_cpu.shape == (rows, length) and batch.token_ids_cpu.dtype == np.int32
    for name in ("num_tokens_no_spec", "num_computed_tokens_cpu", "num_prompt_tokens"):
        column = getattr(batch, name)
        assert column.shape == (rows,) and column.dtype.kind == "i", name
    assert hasattr(engine._core.scheduler, "update_draft_token_ids")
    assert not engine._runner.use_async_scheduling


def test_steps_without_drafts_are_laid_out_without_verification(engine, plain):
    """Also the contract: taking `speculative_config` from the runner and giving it back is enough."""
    assert engine._runner.num_spec_tokens == WINDOW
    seen = []
    native = engine._runner._sample

    def record(logits, metadata):
        seen.append(metadata is not None)
        return native(logits, metadata)

    batch, texts = requests()[:24], texts_for(plain, "right")
    engine._runner._sample = record
    try:
        with engine.scripted_drafts(lambda i, done: follow(texts)(i, done) if 6 < len(done) < 14 else []):
            drafted = run_to_end(engine, batch)
        with_drafts, seen[:] = list(seen), []
        drafted += run_to_end(engine, batch)
    finally:
        engine._runner._sample = native
    assert compare([plain[o.request_id] for o in drafted], drafted).flipped == 0
    assert True in with_drafts and False in with_drafts and True not in seen
