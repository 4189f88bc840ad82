"""What other libraries leave in modules does not keep an engine from starting."""

import sys
import types
from importlib import import_module

import pytest

from antiphon.services.rollout.engine.environment import EngineSettings, prepare_environment
from antiphon.services.rollout.engine.vllm_compat import spare_foreign_libraries, spare_held_blocks

pytestmark = pytest.mark.engine


@pytest.fixture
def dispatcher(tmp_path):
    prepare_environment(EngineSettings(model_dir=tmp_path))
    return import_module("vllm.triton_utils.dispatcher")


class _AnswersToAnything:
    def __getattr__(self, name):
        return lambda *_: None


class _RefusesToAnswer:
    @property
    def __dict__(self):
        raise RuntimeError("working outside of a request")


def test_a_search_for_kernels_passes_over_other_libraries(dispatcher, monkeypatch):
    kernel, wrapper = object(), object()
    foreign, own = types.ModuleType("foreign_library"), types.ModuleType("vllm.own")
    foreign.bindings, foreign.request = _AnswersToAnything(), _RefusesToAnswer()
    own.copied, own.owner = kernel, types.SimpleNamespace(kernel=kernel)
    for module in (foreign, own):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spare_foreign_libraries()
    dispatcher._rebind_kernels([(kernel, wrapper)])
    assert own.copied is wrapper
    assert own.owner.kernel is wrapper


class FullAttentionManager:
    block_size = 32

    def __init__(self):
        self.req_to_blocks = {"running": [object(), object()]}


def planner(*layers, enable_caching=False):
    manager = types.SimpleNamespace(
        coordinator=types.SimpleNamespace(single_type_managers=layers),
        enable_caching=enable_caching,
        empty_kv_cache_blocks="nothing",
        max_model_len=96,
        allocate_slots=lambda request, tokens, **options: "allocated",
    )
    spare_held_blocks(types.SimpleNamespace(scheduler=types.SimpleNamespace(kv_cache_manager=manager)))
    return manager.allocate_slots


@pytest.mark.parametrize(
    ("request_id", "computed", "tokens", "ahead", "answer"),
    [
        ("running", 40, 1, 0, "nothing"),
        ("running", 40, 24, 0, "nothing"),
        ("running", 40, 25, 0, "allocated"),
        ("running", 40, 20, 5, "allocated"),
        ("running", 40, 0, 0, "allocated"),
        ("other", 0, 1, 0, "allocated"),
    ],
)
def test_only_what_a_request_does_not_hold_is_allocated(request_id, computed, tokens, ahead, answer):
    request = types.SimpleNamespace(request_id=request_id, num_computed_tokens=computed)
    allocate = planner(FullAttentionManager())
    assert allocate(request, tokens, num_lookahead_tokens=ahead) == answer
    assert allocate(request, tokens, num_lookahead_tokens=ahead, new_computed_blocks=None) == "allocated"


def test_layers_that_see_a_part_and_shared_blocks_are_left_to_vllm():
    request = types.SimpleNamespace(request_id="running", num_computed_tokens=1)
    for allocate in (
        planner(FullAttentionManager(), FullAttentionManager()),
        planner(types.SimpleNamespace()),
        planner(FullAttentionManager(), enable_caching=True),
    ):
        assert allocate(request, 1, num_lookahead_tokens=0) == "allocated"
