"""What an engine's startup check concludes: which distributions it tells apart, and when drafts stay off."""

from contextlib import nullcontext
from dataclasses import replace
from math import erfc, sqrt

import numpy as np
import pytest
from structlog.testing import capture_logs

from antiphon.api.engine import EngineOutput
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.records import FinishReason, SamplingParameters
from antiphon.services.rollout.selfcheck import distribution_check as check
from antiphon.services.rollout.selfcheck.draft_check import DraftReport, IdentityCheck, compare
from tests.support.loop_model import make_config

SOUND = check.DistributionCheck(SamplingParameters(), 500, 15, 0.4, 0, 1e-7)
SAME = IdentityCheck(requests=64, flipped=0, logprob_difference=0.0, bits_equal=True)


def report(**changes) -> DraftReport:
    return replace(DraftReport((SOUND, SOUND), SAME, accepted=90, dtype="float32"), **changes)


@pytest.mark.parametrize(
    ("seen", "elastic", "fixed"),
    [
        (report(), None, None),
        (report(distributions=(SOUND, replace(SOUND, z=7.0))), "do not follow", "do not follow"),
        (report(distributions=(SOUND, replace(SOUND, impossible=1))), "1 impossible", "1 impossible"),
        (report(accepted=0), "accepted none", "accepted none"),
        (report(identity=None), None, "native"),
        (report(identity=replace(SAME, flipped=1)), "changed tokens in 1 of 64", "changed tokens"),
        (report(identity=replace(SAME, logprob_difference=2e-5)), "by 2e-05 nats", "nats"),
        (report(identity=replace(SAME, logprob_difference=4e-6, bits_equal=False)), None, "bit for bit"),
        (report(identity=replace(SAME, flipped=9, bits_equal=False), dtype="bfloat16"), None, "bit for bit"),
        (report(identity=replace(SAME, flipped=40), dtype="bfloat16"), "40 of 64", "40 of 64"),
    ],
)
def test_why_drafts_stay_off(seen, elastic, fixed):
    for bits, word in ((False, elastic), (True, fixed)):
        reason = seen.why_not(bits)
        assert reason is None if word is None else word in reason


def output(tokens, logprobs) -> EngineOutput:
    return EngineOutput(
        np.array(tokens, np.int32), np.array(logprobs, np.float32), (), FinishReason.LENGTH, request_id="r"
    )


def test_comparing_answers():
    plain = output([1, 2, 3], [-1, -2, -3])
    assert compare([plain], [plain]) == IdentityCheck(1, 0, 0.0, True)
    assert compare([plain], [output([1, 2, 3], [-1, -2.5, -3])]) == IdentityCheck(1, 0, 0.5, False)
    # After a token that differs there is nothing to compare.
    assert compare([plain], [output([1, 9, 3], [-1, -9, -9])]) == IdentityCheck(1, 1, 0.0, False)
    assert compare([plain], [output([1, 2], [-1, -2])]) == IdentityCheck(1, 1, 0.0, False)


@pytest.mark.parametrize("degrees", [1, 3, 15, 60])
def test_the_statistic_is_standard_normal_whatever_the_degrees(degrees):
    chance = np.random.default_rng(degrees)
    p = np.full(degrees + 1, 1 / (degrees + 1))
    zs = np.array([check.chi_square_z(chance.multinomial(4000, p).astype(float), p)[0] for _ in range(4000)])
    for limit in (1.0, 2.0):
        wanted = 0.5 * erfc(limit / sqrt(2))
        assert abs((zs > limit).mean() - wanted) < 0.015
    assert zs.max() < check.Z_LIMIT


@pytest.mark.parametrize("preferred", [0, 2, 4])
def test_places_are_uniform_and_show_a_favoured_token(preferred):
    chance = np.random.default_rng(1)
    p = np.array([0.4, 0.3, 0.2, 0.1, 0.0])
    laid = check.PreferredFirst(p)
    tokens = chance.choice(5, size=4000, p=p)
    within = chance.random(4000)
    points = np.array([laid.point(int(t), preferred, float(w)) for t, w in zip(tokens, within, strict=True)])
    assert points.min() >= 0 and points.max() < 1
    assert check.uniform_z(points)[0] < 4 and check.uniform_z(points)[1] == 15
    if p[preferred]:
        tokens[:600] = preferred  # 600 of 4,000 drafts waved through
        bent = np.array(
            [laid.point(int(t), preferred, float(w)) for t, w in zip(tokens, within, strict=True)]
        )
        assert check.uniform_z(bent)[0] > check.Z_LIMIT


def test_too_few_places_say_nothing():
    assert check.uniform_z(np.array([0.5] * 31)) == (0.0, 0)


SIZE = 151_936


def open_distribution(deviation: float, vocabulary: int = SIZE) -> np.ndarray:
    logits = deviation * np.random.default_rng(5).standard_normal(vocabulary)
    p = np.exp(logits - logits.max())
    return p / p.sum()


def spare(kind: str, p: np.ndarray) -> np.ndarray:
    """Return what a sampler draws from that never draws half of the vocabulary."""
    ids, rank = np.arange(len(p)), np.argsort(np.argsort(-p))
    never = {
        "upper": ids >= len(p) // 2,
        "lower": ids < len(p) // 2,
        "odd": ids % 2 == 1,
        "improbable": rank >= len(p) // 8,
    }[kind]
    q = np.where(never, 0.0, p)
    return q / q.sum()


@pytest.mark.parametrize(
    ("kind", "deviation"),
    [(kind, deviation) for kind in ("upper", "lower", "odd") for deviation in (1.0, 2.0, 4.0)]
    + [("improbable", 1.0), ("improbable", 2.0)],
)
def test_a_sampler_that_never_draws_half_of_the_vocabulary_is_found(kind: str, deviation: float) -> None:
    p, chance = open_distribution(deviation), np.random.default_rng(1)
    tokens = chance.choice(len(p), size=768, p=spare(kind, p))
    z, degrees = check.law_z(tokens, p, chance.random(768))
    assert degrees > 0 and z > check.Z_LIMIT


@pytest.mark.parametrize(("vocabulary", "deviation"), [(SIZE, 1.0), (SIZE, 3.0), (600, 2.0), (2, 0.1)])
def test_an_honest_sampler_passes(vocabulary: int, deviation: float) -> None:
    # The limit of 6 is exceeded about once in 10^9 tests; here each start is the worst of four.
    p, chance = open_distribution(deviation, vocabulary), np.random.default_rng(2)
    starts = 60 if vocabulary == SIZE else 1000
    zs = [
        check.law_z(chance.choice(vocabulary, size=768, p=p), p, chance.random(768))[0] for _ in range(starts)
    ]
    assert max(zs) < 4.5  # once in 10^5


def test_one_possible_token_is_no_fault() -> None:
    p = np.zeros(50)
    p[7] = 1.0
    z, degrees = check.law_z(np.full(768, 7), p, np.random.default_rng(3).random(768))
    assert degrees > 0 and z < 4


def test_wrong_logprobs_are_a_fault() -> None:
    assert SOUND.holds and not replace(SOUND, logprob_error=0.01).holds
    assert replace(SOUND, logprob_error=0.01, logprob_limit=0.3).holds
    assert "off by 0.01 nats" in replace(SOUND, logprob_error=0.01).words


def test_cut_sets_are_checked_where_rounding_does_not_move_them() -> None:
    assert any(case.top_k for case in check.sampling_cases("float32"))
    assert not any(case.top_k or case.top_p < 1 for case in check.sampling_cases("bfloat16"))


class LightEngine:
    """Only what the start-up decision touches."""

    def __init__(self, settings):
        self.settings, self.drafts = settings, bool(settings.draft_tokens)

    def use_drafts(self, on):
        self.drafts = on

    def alike(self):
        return nullcontext()

    def close(self):
        self.settings = None


@pytest.fixture
def build(monkeypatch, tmp_path):
    from antiphon.services.rollout import process as service
    from antiphon.services.rollout.engine import vllm_engine
    from antiphon.services.rollout.selfcheck import startup_check

    def run(drafts, *, mode="elastic", distribution_check=SOUND, even=True, accept=False, keeps=True):
        difference = 0.0 if even else 3e-3
        seen = startup_check.StartupReport((distribution_check,), even, difference, even, drafts)
        seen = replace(seen, keeps_prefixes=keeps)
        monkeypatch.setattr(startup_check, "run_startup_check", lambda engine: seen)
        monkeypatch.setattr(vllm_engine, "VllmEngine", LightEngine)
        monkeypatch.setattr(service, "resolve_model_path", lambda path: str(tmp_path))
        config = make_config(mode=mode, max_staleness=0 if mode == "fixed" else 2)
        loop = config.loop.model_copy(update={"accept_uneven": accept})
        return service.build_engine(config.model_copy(update={"loop": loop}))

    return run


def test_drafts_are_left_on_where_they_change_nothing(build):
    with capture_logs() as logs:
        assert build(report()).drafts
    assert [entry["event"] for entry in logs] == ["engine.tested"] and logs[0]["drafts_hold"]


def test_drafts_that_change_something_are_switched_off_loudly(build):
    with capture_logs() as logs:
        assert not build(report(identity=replace(SAME, flipped=3))).drafts
    (off,) = [entry for entry in logs if entry["event"] == "drafting.off"]
    assert off["log_level"] == "warning" and "3 of 64" in off["reason"]


def test_fixed_mode_asks_for_equal_bits(build):
    uneven = report(identity=replace(SAME, bits_equal=False))
    assert build(uneven).drafts and not build(uneven, mode="fixed").drafts


def test_another_distribution_without_drafts_ends_the_worker(build):
    with pytest.raises(IntegrityError, match="do not follow"):
        build(report(), distribution_check=replace(SOUND, z=9.0))


def test_fixed_mode_refuses_an_uneven_engine_unless_told_to_take_it(build):
    with capture_logs() as logs, pytest.raises(ConfigError, match=r"loop\.accept_uneven=true and lose"):
        build(report(), mode="fixed", even=False)
    assert "engine.uneven" in [entry["event"] for entry in logs]
    with capture_logs() as logs:
        engine = build(report(), mode="fixed", even=False, accept=True)
    assert "engine.uneven" in [entry["event"] for entry in logs]
    assert not engine.continues and not engine.numerics
    assert build(report(), even=False).continues  # elastic mode takes it, and nobody samples the same
    assert not build(report(), even=False).numerics


def test_fixed_mode_refuses_an_engine_whose_kept_prefixes_change_bits(build):
    with pytest.raises(ConfigError, match=r"keeps of earlier turns changes the bits .* task with turns"):
        build(report(), mode="fixed", keeps=False)
    assert build(report(), mode="fixed", keeps=False, accept=True)
    assert build(report(), keeps=False)


def test_engines_of_equal_numerics_say_the_same(build, monkeypatch):
    from antiphon.services.rollout import process as service

    settings = service.engine_settings(make_config(), "/")
    own = service.fingerprint(settings)
    assert build(report()).numerics and own == service.fingerprint(settings)
    assert own != service.fingerprint(replace(settings, dtype="bfloat16"))
    assert own != service.fingerprint(replace(settings, rule="gumbel"))
    monkeypatch.setattr(service, "hardware", lambda: {"machine": "x86_64", "cpu": "another", "gpus": []})
    assert own != service.fingerprint(settings)


def test_an_engine_without_weights_tests_itself_on_the_first_snapshot(build, tmp_path):
    from antiphon.models.directory import TENSOR_TABLE

    (tmp_path / TENSOR_TABLE).write_text("[]")
    engine = build(None, distribution_check=replace(SOUND, z=9.0))  # random weights test nothing
    with pytest.raises(IntegrityError, match="the engine failed its test of itself: tokens sampled"):
        engine.before_serving(engine)
    uneven = build(None, mode="fixed", even=False)
    with pytest.raises(IntegrityError, match="failed its test of itself: log-probabilities of this engine"):
        uneven.before_serving(uneven)
    sound = build(None)
    sound.before_serving(sound)
    assert sound.continues and sound.numerics
