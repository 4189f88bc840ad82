"""What an engine's startup check concludes: which distributions it tells apart, and when drafts stay off."""

from dataclasses import replace
from math import erfc, sqrt

import numpy as np
import pytest
from structlog.testing import capture_logs

from antiphon.core.errors import IntegrityError
from antiphon.core.records import FinishReason, SamplingParameters
from antiphon.services.rollout.engine.api import EngineOutput
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


class LightEngine:
    """Only what the start-up decision touches."""

    def __init__(self, settings):
        self.settings, self.drafts, self.sampler = settings, bool(settings.draft_tokens), settings.sampler

    def use_drafts(self, on):
        self.drafts = on


@pytest.fixture
def build(monkeypatch, tmp_path):
    from antiphon.services.rollout import process as service
    from antiphon.services.rollout.engine import vllm_engine
    from antiphon.services.rollout.selfcheck import startup_check

    def run(drafts, *, mode="elastic", distribution_check=SOUND):
        seen = startup_check.StartupReport("keyed", (distribution_check,), True, 0.0, True, drafts)
        monkeypatch.setattr(startup_check, "run_startup_check", lambda engine: seen)
        monkeypatch.setattr(vllm_engine, "VllmEngine", LightEngine)
        monkeypatch.setattr(service, "local_model_directory", lambda path: tmp_path)
        return service.build_engine(make_config(mode=mode, max_staleness=0 if mode == "fixed" else 2))

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
