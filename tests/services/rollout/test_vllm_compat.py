"""What other libraries leave in modules does not keep an engine from starting."""

import sys
import types
from importlib import import_module

import pytest

from antiphon.services.rollout.engine.environment import EngineSettings, prepare_environment
from antiphon.services.rollout.engine.vllm_compat import spare_foreign_libraries

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
