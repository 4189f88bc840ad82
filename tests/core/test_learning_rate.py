"""The learning rate of each update: warm-up, then constant, linear or cosine to the end of the run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.config import build_config
from antiphon.core.config_sections import LearnerSection
from antiphon.core.errors import ConfigError
from antiphon.core.learning_rate import rate_by_size, rate_share, warmup_steps


def test_a_schedule_in_numbers() -> None:
    def shares(**choice: object) -> list[float]:
        share = rate_share(LearnerSection(warmup_steps=2, **choice), steps=6, updates_per_step=1)
        return [round(share(update), 3) for update in range(8)]

    assert shares(schedule="constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert shares(schedule="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert shares(schedule="cosine") == [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    assert shares(schedule="linear", final_rate_share=0.2) == [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.none() | st.integers(0, 20),
    steps=st.integers(1, 60),
    updates=st.integers(1, 4),
    last=st.floats(0.0, 1.0),
)
def test_a_rate_rises_and_then_never_rises_again(
    schedule: str, warmup: int | None, steps: int, updates: int, last: float
) -> None:
    section = LearnerSection(schedule=schedule, warmup_steps=warmup, final_rate_share=last)
    share = rate_share(section, steps, updates)
    found = [share(update) for update in range(steps * updates)]
    rising = min(len(found), warmup_steps(section, steps) * updates)
    assert all(0.0 < one <= 1.0 for one in found)
    assert found[:rising] == sorted(found[:rising])
    assert found[rising:] == sorted(found[rising:], reverse=True)
    assert min(found[rising:], default=1.0) >= last


def test_a_warm_up_that_is_left_out_fits_into_any_run() -> None:
    assert [warmup_steps(LearnerSection(), steps) for steps in (1, 4, 10, 60)] == [0, 2, 5, 5]


@pytest.mark.parametrize(
    ("parameters", "rate"),
    [(1, 2e-4), (450_000, 2e-4), (10**7, 2e-5), (124_000_000, 1e-6), (8 * 10**9, 1e-6)],
)
def test_a_larger_model_gets_no_larger_rate(parameters: int, rate: float) -> None:
    assert rate_by_size(parameters) == rate


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.warmup_steps=9 is no shorter than run\.steps=8"):
        build_config({"run": {"steps": 8}, "learner": {"warmup_steps": 9}})
