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


def test_a_search_for_kernels_passes_over_objects_without_a_dictionary(dispatcher, monkeypatch):
    kernel, wrapper = object(), object()
    foreign = types.ModuleType("foreign_library")
    foreign.bindings, foreign.request, foreign.copied = _AnswersToAnything(), _RefusesToAnswer(), kernel
    monkeypatch.setitem(sys.modules, foreign.__name__, foreign)
    spare_foreign_libraries()
    dispatcher._rebind_kernels([(kernel, wrapper)])
    assert foreign.copied is wrapper


def test_a_kernel_held_by_an_object_is_still_found(dispatcher, monkeypatch):
    kernel, wrapper = object(), object()
    foreign = types.ModuleType("foreign_library")
    foreign.owner = types.SimpleNamespace(kernel=kernel)
    monkeypatch.setitem(sys.modules, foreign.__name__, foreign)
    spare_foreign_libraries()
    dispatcher._rebind_kernels([(kernel, wrapper)])
    assert foreign.owner.kernel is wrapper
