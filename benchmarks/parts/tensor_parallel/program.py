"""The processes of the benchmark of tensor parallel engines.

python -m antiphon.benchmarks.parts.tensor_parallel.program play FOLDER PARTS DRAFTS   one rank
python -m antiphon.benchmarks.parts.tensor_parallel.program engine CONFIG              until killed

What each rank of `play` got goes to FOLDER/PARTS-DRAFTS-RANK.json.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from antiphon.api.engine import Engine, EngineOutput, EngineRequest
from antiphon.core.config import load_config
from antiphon.core.records import PastCompletion, PromptHistory, SamplingParameters
from antiphon.core.seeds import derive_seed, generator
from antiphon.services.rollout.engine.environment import EngineSettings
from antiphon.services.rollout.process import start_engine
from antiphon.system.processes import tie_to_parent
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import VerifiedWeights, open_snapshot, weights_of, write_snapshot

PROJECT = Path(__file__).resolve().parents[3]
MODEL = PROJECT / "examples" / "models" / "chain-sum"
GROUPS, SAMPLES, TOKENS = 6, 4, 96
ABORT, HAND_OVER, SWAP = 2, 4, 6
"""Steps of a pass before which a request is given up, one goes on as another, and weights are swapped."""
PATIENCE_S = 240.0


def snapshot(store: PayloadStore, version: int) -> VerifiedWeights:
    """Return the demo's weights, a little louder in each version, from a snapshot's file."""
    tensors = {
        name: tensor * (1.0 + 0.01 * version) if "norm" in name else tensor
        for name, tensor in load_file(MODEL / "model.safetensors").items()
        if name != "lm_head.weight"
    }
    return open_snapshot(write_snapshot(store, "tensor-parallel", version, weights_of(tensors), None), store)


def requests_of(name: str) -> list[EngineRequest]:
    """Return `SAMPLES` requests for each of `GROUPS` prompts, the same whatever the name."""
    drawn = generator("tensor-parallel-prompts", 0).integers(3, 64, size=(GROUPS, 12))
    return [
        EngineRequest(
            f"{name}-{group}-{sample}",
            tuple(prompt[: 8 + group % 5].tolist()),
            derive_seed("tensor-parallel", group, sample),
            SamplingParameters(max_tokens=TOKENS),
            group=f"{name}-{group}",
        )
        for group, prompt in enumerate(drawn)
        for sample in range(SAMPLES)
    ]


def with_history(
    requests: Sequence[EngineRequest], outputs: dict[str, EngineOutput], name: str
) -> list[EngineRequest]:
    """Return the requests with what those of an earlier pass brought as their prompts' history."""
    found = []
    for request in requests:
        group = request.group.rpartition("-")[2]
        past = tuple(
            PastCompletion(np.asarray(outputs[key].token_ids, np.int32), 1, 0, sample, 1.0)
            for sample in range(SAMPLES)
            if (key := f"{name}-{group}-{sample}") in outputs
        )
        found.append(replace(request, history=PromptHistory(group, 0, past)))
    return found


def one_pass(
    engine: Engine, requests: Sequence[EngineRequest], swap: VerifiedWeights | None, version: int
) -> dict[str, EngineOutput]:
    """Sample requests to their end, with all that may happen meanwhile; a swap only where there is one."""
    engine.add(requests)
    outputs: dict[str, EngineOutput] = {}
    step = 0
    while engine.unfinished:
        step += 1
        if step == ABORT:
            engine.abort([requests[3].request_id])
        if step == HAND_OVER:
            leaving = requests[5]
            for one in engine.progress({leaving.request_id: 0}):
                engine.abort([leaving.request_id])
                prefix = tuple(one.token_ids.tolist())
                goes_on = replace(leaving, request_id=f"{leaving.request_id}+", prefix_token_ids=prefix)
                engine.add([goes_on])
        if step == SWAP and swap is not None:
            engine.load_weights(version, swap, swap.digest)
        outputs |= {one.request_id: one for one in engine.step()}
    return outputs


def play(folder: Path, parts: int, drafts: int) -> None:
    """Play the script as one of the ranks of an engine, and note what this rank got."""
    tie_to_parent()
    from antiphon.services.rollout.engine.sharded import ShardedEngine, join
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    got: dict[str, EngineOutput] = {}

    class Noting(ShardedEngine):
        def step(self) -> list[EngineOutput]:
            outputs = super().step()
            got.update({one.request_id: one for one in outputs})
            return outputs

    settings = EngineSettings(
        MODEL, max_model_len=128, max_num_seqs=16, kv_cache_bytes=16 << 20, draft_tokens=drafts,
        tensor_parallel=parts, stop_token_ids=(),  # so that all are long
    )  # fmt: skip
    rank = int(os.environ.get("RANK", "0"))
    engine = VllmEngine(settings) if parts == 1 else Noting(settings, join(settings, PATIENCE_S))
    if rank:
        assert isinstance(engine, ShardedEngine)
        engine.follow(lambda engine: None)
    else:
        store = PayloadStore(folder / f"store-{parts}-{drafts}")
        store.root.mkdir()
        weights = [snapshot(store, version) for version in (0, 1)]
        engine.load_weights(0, weights[0], weights[0].digest)
        outputs = one_pass(engine, requests_of("first"), None if drafts else weights[1], 1)
        if drafts:
            again = with_history(requests_of("drafted"), outputs, "first")
            outputs |= one_pass(engine, again, None, 0)
            again = with_history(requests_of("swapped"), outputs, "first")
            outputs |= one_pass(engine, again, weights[1], 1)
        got.update(outputs)
        engine.close()
    (folder / f"{parts}-{drafts}-{rank}.json").write_text(
        json.dumps({k: noted(one) for k, one in got.items()})
    )


def noted(output: EngineOutput) -> dict[str, Any]:
    """Return what is compared of a completion."""
    return {
        "tokens": output.token_ids.tolist(),
        "logprobs": output.logprobs.tolist(),
        "spans": [[span.version, span.start, span.stop] for span in output.spans],
        "accepted": output.drafting.accepted if output.drafting else 0,
    }


def serve(path: Path) -> None:
    """Start the engine of a configuration, say `stepping`, and sample until this process is ended."""
    tie_to_parent()
    engine = start_engine(load_config(path))
    with engine.rehearsal():
        print("stepping", flush=True)
        number = 0
        while True:
            engine.add([replace(one, request_id=f"{number}-{one.request_id}") for one in requests_of("r")])
            number += 1
            while engine.unfinished:
                engine.step()


if __name__ == "__main__":
    if sys.argv[1] == "play":
        play(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        serve(Path(sys.argv[2]))
