"""No legal group is larger than a message, and groups that travel together stay below one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.config import build_config
from antiphon.core.errors import ConfigError
from antiphon.core.message_sizes import PAGE_BYTES, page


def config_of(group_size: int, max_tokens: int, held_out: int = 1) -> object:
    return build_config(
        {
            "evaluation": {"samples": held_out},
            "loop": {"group_size": group_size},
            "sampling": {"max_tokens": max_tokens},
            "rollout": {"max_model_tokens": max_tokens + 1024},
        }
    )


def test_a_group_that_cannot_travel_is_refused_before_the_run() -> None:
    config_of(64, 65_536)
    words = (
        r"^loop\.group_size=1024 times sampling\.max_tokens=16384 makes groups of up to 132\.1 MiB, but one "
        r"message carries at most 63 MiB; lower either$"
    )
    with pytest.raises(ConfigError, match=words):
        config_of(1024, 16_384)
    with pytest.raises(ConfigError, match=r"^evaluation\.samples=64 times sampling\.max_tokens=200000 makes"):
        config_of(8, 200_000, held_out=64)


@given(st.lists(st.integers(0, 2 * PAGE_BYTES), max_size=40))
def test_a_page_begins_with_the_first_and_exceeds_its_size_only_for_one_alone(sizes: list[int]) -> None:
    found = page(list(enumerate(sizes)), lambda item: item[1])
    assert [index for index, _ in found] == list(range(len(found)))
    assert bool(found) == bool(sizes)
    total = sum(size for _, size in found)
    assert total <= PAGE_BYTES or len(found) == 1
    if len(found) < len(sizes):
        assert total + sizes[len(found)] > PAGE_BYTES
