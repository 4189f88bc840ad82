"""Throughput: what the door costs, and how often clients ask for what takes long."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from transformers import AutoTokenizer

from antiphon.benchmarks.parts.door.environments import COOKBOOKS, client_python
from antiphon.benchmarks.parts.door.served import CONFIG, DoorStats, beside, run_client, served
from antiphon.benchmarks.parts.measure import PROJECT

CLIENT = PROJECT / "benchmarks" / "parts" / "door" / "sample_client.py"
SLOW_S = 30.0
"""How long a future takes in which polls are counted."""
ENGINE_S = 600.0
SIZES = ("rollout.concurrent_groups=64", "loop.group_size=2")
"""Room for as many requests as there are calls."""
VOCABULARY = 4096
"""Of the random policy: one of so many tokens ends an answer."""


def write_prompts(path: Path, count: int) -> Path:
    """Write up to 256 chain sums as token ids, one JSON line each."""
    from antiphon.core.config import load_config
    from antiphon.services.coordinator.prompts import load_prompts

    prompts = load_prompts(load_config(PROJECT / "examples" / "quickstart.yaml"))
    ids = [list(prompts.prompt("train", index).token_ids) for index in range(count)]
    path.write_text("".join(json.dumps(one) + "\n" for one in ids))
    return path


def make_policy(out: Path) -> Path:
    """Write a random policy, which nearly never ends an answer itself, and return its folder."""
    from antiphon.benchmarks.parts.warmstart.tiny_model import ModelShape, build_model, save_tiny_model

    demo = PROJECT / "examples" / "models" / "chain-sum"
    tokenizer = AutoTokenizer.from_pretrained(demo)
    save_tiny_model(build_model(ModelShape(vocabulary=VOCABULARY, context=2048), seed=0), tokenizer, out)
    return out


def throughput(calls: int, rounds: int) -> dict[str, Any]:
    """Sample `calls` prompts at once through the door, and with an engine alone; the first round warms up.

    With answers of 1,536 tokens, and with the demo's, which are short.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="antiphon-door-") as folder:
        long = [f"model.path={make_policy(Path(folder) / 'policy')}", "rollout.max_model_tokens=2048"]
        for name, words in {"": long, "_short": ["rollout.max_model_tokens=512"]}.items():
            through, alone, per_call = _rates(calls, rounds, [*SIZES, *words])
            print(f"tokens/s{name}: {through} through the door, {alone} of the engine", flush=True)
            found |= {
                f"gateway_share{name}": round(median(through) / median(alone), 4),
                f"door_tokens{name}_per_s": round(median(through), 1),
                f"engine_tokens{name}_per_s": round(median(alone), 1),
                f"cpu{name}_ms_per_call": per_call,
            }
    return found


def _rates(calls: int, rounds: int, overrides: list[str]) -> tuple[list[float], list[float], float]:
    """Return tokens per second through the door and of the engine alone, and the door's CPU ms for a call."""
    with served(*overrides) as door:
        prompts = write_prompts(door.home / "prompts.jsonl", calls)
        words = [str(prompts), "--rounds", str(rounds + 1), "--max-tokens", str(_most(overrides))]
        said = run_client(client_python(COOKBOOKS[0]), CLIENT, words, door)
        door.stop()
        alone = _alone(prompts, rounds + 1, overrides)
    through = [row["tokens"] / row["seconds"] for row in said[1:]]
    # Between the ends of the first round, before which the services started, and of the last.
    spent, made = (said[-1][name] - said[0][name] for name in ("cpu_s", "calls"))
    return through, alone, round(1000.0 * spent / made, 3)


def slow_future() -> dict[str, Any]:
    """Count polls for one completion whose worker stands still for half a minute."""
    with served("coordinator.lease_s=120", "coordinator.heartbeat_s=60") as door:
        prompts = write_prompts(door.home / "prompts.jsonl", 1)
        before: list[DoorStats] = []

        def stop_worker(over: Any) -> None:
            """Stop the worker once it is ready, and let it go on."""
            while not over.wait(0.02):
                found = [pid for name, pid in door.services().items() if name.startswith("worker")]
                if found:
                    stopped = _stopped(found[0])
                    before.append(door.stats())
                    over.wait(SLOW_S)
                    for process in stopped:
                        process.send_signal(signal.SIGCONT)
                    return

        with beside(stop_worker):
            said = run_client(client_python(COOKBOOKS[0]), CLIENT, [str(prompts), "--rounds", "1"], door)
        after = door.stats()
    futures = max(1, after.futures - before[0].futures) if before else 0
    return {
        "polls_per_future": round((after.polls - before[0].polls) / futures, 3) if futures else None,
        "slow_future_s": round(max(row["seconds"] for row in said), 1),
    }


def _stopped(pid: int) -> list[psutil.Process]:
    """Stop a process and all that it started."""
    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    for process in family:
        process.send_signal(signal.SIGSTOP)
    return family


def _most(overrides: list[str]) -> int:
    """Return the longest answer that a prompt leaves room for, here three quarters of the context."""
    from antiphon.core.config import load_config

    return load_config(CONFIG, overrides).rollout.max_model_tokens * 3 // 4


def _alone(prompts: Path, rounds: int, overrides: list[str]) -> list[float]:
    """Return the tokens per second of each round but the first, of an engine in a process of its own."""
    from antiphon.core.config import load_config
    from antiphon.services.rollout.engine.environment import child_environment

    threads = load_config(CONFIG, overrides).rollout.threads
    command = [sys.executable, "-P", "-m", "antiphon.benchmarks.parts.door.throughput"]
    command += [str(prompts), str(rounds), *overrides]
    environment = {**os.environ, **child_environment(threads)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=ENGINE_S, env=environment, cwd=PROJECT, check=False
    )
    if done.returncode:
        raise SystemExit(f"the engine alone ended with {done.returncode}\n{done.stderr[-2000:]}")
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found[1:]


def _engine_alone(path: Path, rounds: int, overrides: list[str]) -> list[float]:
    """Sample the prompts with an engine of the run's settings, and return tokens per second of each round."""
    from safetensors.torch import load_file

    from antiphon.api.engine import EngineRequest
    from antiphon.core.config import load_config
    from antiphon.core.records import SamplingParameters
    from antiphon.models.codec import resolve_model_path
    from antiphon.services.rollout.engine.environment import prepare_environment
    from antiphon.services.rollout.process import build_engine, engine_settings
    from antiphon.weights.snapshot import verify

    config = load_config(CONFIG, overrides)
    model = resolve_model_path(config.model.path)
    prepare_environment(engine_settings(config, model))
    engine, rates = build_engine(config), []
    weights = verify(load_file(Path(model) / "model.safetensors"))
    engine.load_weights(0, weights, weights.digest)
    prompts = [tuple(json.loads(line)) for line in path.read_text().splitlines()]
    sampling = SamplingParameters(temperature=1.0, max_tokens=_most(overrides))
    for number in range(rounds):
        begun, tokens = time.perf_counter(), 0
        engine.add(
            [
                EngineRequest(f"{number}-{place}", prompt, number * len(prompts) + place, sampling)
                for place, prompt in enumerate(prompts)
            ]
        )
        while engine.unfinished:
            tokens += sum(len(output.token_ids) for output in engine.step())
        rates.append(tokens / (time.perf_counter() - begun))
    engine.close()
    return rates


if __name__ == "__main__":
    print(json.dumps(_engine_alone(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
