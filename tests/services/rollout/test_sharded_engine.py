"""An engine of two processes samples what one of one does, on both ranks, and ends whole."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.api.engine import EngineRequest
from antiphon.core.config import build_config, dump_config
from antiphon.core.errors import ConfigError
from antiphon.core.records import PastCompletion, PromptHistory, SamplingParameters
from antiphon.services.rollout.engine.environment import child_environment
from antiphon.services.rollout.process import engine_settings, fingerprint

PROJECT = Path(__file__).resolve().parents[3]
MODEL = PROJECT / "examples" / "models" / "chain-sum"
ENGINE = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]
CONFIG = {
    "model": {"path": str(MODEL)},
    "loop": {"group_size": 4},
    "rollout": {"tensor_parallel": 2, "concurrent_groups": 2, "kv_cache_mib": 16},
    "drafting": {"enabled": False},
}
ASTRAY = """
import sys
from pathlib import Path
from antiphon.benchmarks.parts.tensor_parallel.program import requests_of
from antiphon.core.config import load_config
from antiphon.services.rollout.engine.vllm_engine import VllmEngine
from antiphon.services.rollout.process import start_engine
engine = start_engine(load_config(Path(sys.argv[1])))
with engine.rehearsal():
    engine.add(requests_of("known"))
    engine.step()
    VllmEngine.add(engine, requests_of("unknown"))  # not passed on
    while engine.unfinished:
        engine.step()
print("went on")
"""
FAILING = """
import sys
from pathlib import Path
from antiphon.benchmarks.parts.tensor_parallel.program import requests_of
from antiphon.core.config import load_config
from antiphon.services.rollout.process import start_engine
def full():
    raise RuntimeError("out of memory")
engine = start_engine(load_config(Path(sys.argv[1])))
with engine.rehearsal():
    engine.add(requests_of("known"))
    engine.step()
    engine._core.step_fn = full  # the other rank's is as it was, and waits for this one
    try:
        engine.step()
    finally:
        engine.close()
"""

tokens = st.lists(st.integers(0, 151_935), max_size=6).map(tuple)
histories = st.builds(
    PromptHistory,
    st.text(max_size=4),
    st.integers(0, 9),
    st.lists(
        st.builds(
            PastCompletion,
            tokens.map(lambda found: np.array(found, np.int32)),
            st.integers(0, 99),
            st.integers(0, 9),
            st.integers(0, 15),
            st.floats(0, 1),
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
)
samplings = st.builds(
    SamplingParameters,
    st.floats(0, 2),
    st.integers(0, 100),
    st.floats(0.1, 1),
    st.integers(1, 4096),
    st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    tokens,
)


def comparable(request: EngineRequest) -> object:
    past = request.history and [
        (one.token_ids.tolist(), one.version, one.epoch, one.sample_index, one.reward)
        for one in request.history.completions
    ]
    rest = (request.request_id, request.prompt_token_ids, request.seed, request.sampling, request.group)
    head = request.history and (request.history.prompt_key, request.history.epoch)
    return rest, head, past, request.prefix_token_ids, request.turn_begin


@given(
    st.lists(
        st.builds(
            EngineRequest,
            st.text(max_size=5),
            tokens,
            st.integers(0, 2**64 - 1),
            samplings,
            st.text(max_size=3),
            st.none() | histories,
            tokens,
            st.integers(0, 5),
        ),
        max_size=3,
    )
)
def test_requests_arrive_at_other_ranks_as_they_were(requests: list[EngineRequest]) -> None:
    from antiphon.services.rollout.engine.sharded import decode_requests, encode_requests

    again = decode_requests(encode_requests([*requests, *requests]))
    assert list(map(comparable, again)) == list(map(comparable, [*requests, *requests]))


def test_engines_of_other_numbers_of_processes_have_other_numerics() -> None:
    def numerics(parts: int) -> str:
        config = build_config({**CONFIG, "rollout": {"tensor_parallel": parts}})
        return fingerprint(engine_settings(config, str(MODEL)))

    assert numerics(1) != numerics(2) and numerics(2) == numerics(2)


def test_a_model_that_does_not_divide_is_refused_before_anything_starts() -> None:
    config = build_config({**CONFIG, "rollout": {"tensor_parallel": 3}})
    with pytest.raises(
        ConfigError, match=r"rollout\.tensor_parallel=3 does not divide the 4 attention heads"
    ):
        engine_settings(config, str(MODEL))


class TestTwoProcesses:
    pytestmark = ENGINE

    @pytest.mark.parametrize("drafts", [0, 8])
    def test_both_ranks_sample_what_one_process_does(self, tmp_path: Path, drafts: int) -> None:
        from antiphon.benchmarks.tensor_parallel import compare

        found = compare(tmp_path, drafts)
        assert found["ranks_equal"]
        assert found["equal"] >= 0.999 * found["positions"] > 0 and found["logprob_difference"] <= 1e-4
        assert bool(found["accepted"]) == bool(drafts)

    def test_killed_engines_leave_nothing_that_the_next_one_minds(self, tmp_path: Path) -> None:
        from antiphon.benchmarks.tensor_parallel import kill

        expected = {"kills": 2, "starts": 2, "orphans": 0, "segments_left": 0}
        assert kill(tmp_path, 2) == expected

    @pytest.mark.parametrize(
        ("program", "sentence"),
        [
            (ASTRAY, "rank 1 of the engine cannot go on at step 1: its schedule is (24"),
            (FAILING, "rank 0 of the engine: out of memory"),
        ],
    )
    def test_a_rank_that_plans_otherwise_or_fails_ends_the_worker_in_one_sentence(
        self, tmp_path: Path, program: str, sentence: str
    ) -> None:
        (tmp_path / "config.yaml").write_text(dump_config(build_config(CONFIG)))
        command = [sys.executable, "-P", "-W", "ignore", "-c", program, str(tmp_path / "config.yaml")]
        done = subprocess.run(command, env=child_environment(1), capture_output=True, text=True, timeout=240)
        assert done.returncode == 75 and "went on" not in done.stdout
        assert sentence in done.stderr
