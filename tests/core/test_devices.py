"""Who takes which GPU: none goes to two, none is made up, and too few are said before anything starts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.config import build_config
from antiphon.core.config_sections import LearnerSection, RolloutSection
from antiphon.core.devices import Devices, assign_devices, visible
from antiphon.core.errors import ConfigError


def sections(**given: object) -> tuple[LearnerSection, RolloutSection]:
    learner = {name.removeprefix("learner_"): v for name, v in given.items() if name.startswith("learner_")}
    rollout = {name: value for name, value in given.items() if not name.startswith("learner_")}
    return LearnerSection(**learner), RolloutSection(**rollout)  # type: ignore[arg-type]


def test_a_node_of_eight_is_shared_out_the_learner_first() -> None:
    found = assign_devices(*sections(learner_ranks=4, workers=2, tensor_parallel=2), 8)
    assert found == Devices((0, 1, 2, 3), ((4, 5), (6, 7)))


def test_what_is_named_is_kept_and_the_rest_goes_around_it() -> None:
    assert assign_devices(*sections(learner_devices=[2], workers=2), 3) == Devices((2,), ((0,), (1,)))
    assert assign_devices(*sections(devices=[[0]], workers=1), 2) == Devices((1,), ((0,),))


def test_the_only_gpu_is_shared_and_without_one_nobody_takes_any() -> None:
    assert assign_devices(*sections(workers=2), 1) == Devices((0,), ((0,), (0,)))
    assert assign_devices(*sections(workers=2), 0) == Devices()


@pytest.mark.parametrize(
    "given, found, words",
    [
        ({"learner_devices": [1], "devices": [[1]]}, 2, r"give GPU 1 to two"),
        ({"learner_devices": [0]}, 0, r"names GPU 0, and this machine has no GPU"),
        ({"devices": [[3]]}, 2, r"names GPU 3, and this machine sees GPUs 0 to 1"),
        (
            {"learner_ranks": 2, "workers": 4, "tensor_parallel": 2},
            8,
            r"take 10 GPUs, and this machine has 8",
        ),
        ({"learner_devices": [0], "workers": 1}, 1, r"take 2 GPUs, and this machine has 1"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(given: dict[str, object], found: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        assign_devices(*sections(**given), found)


@given(ranks=st.integers(1, 8), workers=st.integers(0, 6), each=st.integers(1, 4), found=st.integers(2, 32))
def test_nobody_shares_a_gpu_where_there_are_several(ranks: int, workers: int, each: int, found: int) -> None:
    learner, rollout = sections(learner_ranks=ranks, workers=workers, tensor_parallel=each)
    if ranks + workers * each > found:
        with pytest.raises(ConfigError):
            assign_devices(learner, rollout, found)
        return
    devices = assign_devices(learner, rollout, found)
    taken = [*devices.learner, *(one for worker in devices.workers for one in worker)]
    assert len(taken) == len(set(taken)) == ranks + workers * each
    assert [len(one) for one in devices.workers] == [each] * workers


def test_a_process_sees_its_own_by_the_names_that_the_command_saw() -> None:
    assert visible((1, 0), ["4", "GPU-7"]) == {"CUDA_VISIBLE_DEVICES": "GPU-7,4"}
    assert visible((), ["4"]) == {}


@pytest.mark.parametrize(
    "given, words",
    [
        (
            {"learner": {"ranks": 2, "devices": [0]}},
            r"learner.devices=\[0\] names 1 GPUs for learner.ranks=2",
        ),
        ({"rollout": {"workers": 2, "devices": [[0]]}}, r"names GPUs for 1 workers"),
        ({"rollout": {"devices": [[0, 1]]}}, r"name rollout.tensor_parallel=1 for each"),
        ({"rollout": {"graphs": "piecewise"}}, r"rollout.graphs=piecewise needs .*rollout.compiled=true"),
    ],
)
def test_counts_and_graphs_that_do_not_fit_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_config(given)
