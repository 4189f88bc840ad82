"""Qwen3 in all its sizes: the tensors that the learner publishes are those that the engine has room for.

Both are built without memory; packed matrices of the engine must be the published ones, one below the other.
"""

import json
import re
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from antiphon.services.rollout.engine.environment import child_environment

DENSE = {
    "0.6B": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072),
    "1.7B": dict(hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, intermediate_size=6144),
    "4B": dict(hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, intermediate_size=9728),
    "8B": dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12288),
    "14B": dict(hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, intermediate_size=17408),
    "32B": dict(hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, intermediate_size=25600),
}
BILLIONS = {
    "0.6B": 0.596,
    "1.7B": 1.721,
    "4B": 4.022,
    "8B": 8.191,
    "14B": 14.768,
    "32B": 32.762,
    "30B-A3B": 30.532,
}
"""Parameters of each, as its publisher counts them."""
SERVED = ("0.6B", "8B")
"""Sizes that the engine is asked about: the head tied, the head apart."""
EXPERTS = dict(
    hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[],
    norm_topk_prob=True, intermediate_size=6144,
)  # fmt: skip
ENGINE = """
import json, os, sys
from pathlib import Path
from antiphon.services.rollout.engine.environment import EngineSettings, prepare_environment
folders = [Path(word) for word in sys.argv[1:]]
prepare_environment(EngineSettings(folders[0]))
from antiphon.models.spared_libraries import spare_unused_libraries
from antiphon.services.rollout.engine.vllm_compat import spare_unused_parts
spare_unused_libraries()
spare_unused_parts(compiles=False)
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import get_model_architecture
found = {}
for folder in folders:
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=64,
        enforce_eager=True,
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/meet", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        kind, _ = get_model_architecture(config.model_config)
        with torch.device("meta"):
            model = kind(vllm_config=config)
    shapes = {name: list(one.shape) for name, one in model.named_parameters()}
    found[folder.name] = {"shapes": shapes, "packed": getattr(model, "packed_modules_mapping", {})}
print(json.dumps(found))
"""
LEARNER = """
import json, sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from antiphon.services.learner import asked_tensors
found = {}
for folder in map(Path, sys.argv[1:]):
    sys.argv = ["", str(folder)]
    with redirect_stdout(StringIO()) as said:
        asked_tensors.main()
    found[folder.name] = json.loads(said.getvalue())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = []
    for name in BILLIONS:
        shape = {"num_key_value_heads": 8, **DENSE.get(name, EXPERTS)}
        experts = name not in DENSE
        folder = tmp_path_factory.mktemp("sizes") / name
        folder.mkdir()
        config = {
            "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if experts else "qwen3",
            "vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960,
            "tie_word_embeddings": name in ("0.6B", "1.7B", "4B"), "rope_theta": 1e6, **shape,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        made.append(folder)
    return made


def asked(program: str, folders: list[Path]) -> dict:
    program = f"import gc; gc.disable()  # a third of what loading takes\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, folders)],
        env={**child_environment(1), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def unpacked(engine: dict, published: dict) -> dict:
    """Return the engine's tensors under the published names; packed ones where their parts fill them."""
    found = {}
    for name, shape in engine["shapes"].items():
        pack = next((one for one in engine["packed"] if f".{one}." in name), None)
        parts = [name] if pack is None else [name.replace(pack, part) for part in engine["packed"][pack]]
        shapes = [published.get(part, [0]) for part in parts]
        if [sum(one[0] for one in shapes), *shapes[0][1:]] == shape:
            found.update(zip(parts, shapes, strict=True))
        else:
            found[name] = shape
    return found


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_every_size_has_the_parameters_and_the_names_that_the_engine_takes(folders: list[Path]) -> None:
    learner = asked(LEARNER, folders)
    engine = asked(ENGINE, [folder for folder in folders if folder.name in SERVED])
    forms = {}
    for name, billions in BILLIONS.items():
        published = learner[name]["asked"]
        assert sum(map(prod, published.values())) == pytest.approx(billions * 1e9, rel=1e-3), name
        forms[name] = {re.sub(r"\.\d+\.", ".N.", tensor) for tensor in published}
        if name in SERVED:
            assert unpacked(engine[name], published) == published, name
    # The others have the names of one of these, for other numbers of layers.
    assert all(any(forms[name] == forms[served] for served in SERVED) for name in DENSE)
