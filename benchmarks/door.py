"""Door: loops that others write, against `antiphon door`, in environments that know nothing of this project.

Each part has doors of its own, as processes; clients are programs of the SDK 0.38 and of two cookbooks.

`recipes`: the cookbook's `math_rl env=arithmetic` and `rl_loop` as they are, of both cookbooks, and a
supervised loop on a local file (`recipes_ok` of `recipes`); calls of theirs that were not served
(`unserved`); the mean distance of sampled from trained log-probabilities, largest over all steps
(`kl_sample_train`, nats); and the reward that `math_rl` reaches with a tiny model, as a share of what
`antiphon run` reaches on the same task with as many samples (`arithmetic_share`).
`losses`: each loss, value and gradient, against a second implementation in float64 (`loss_error_worst`).
`chunks`: the same rows in one call, in seven that arrive out of order, and with all requests sent twice.
`resume`: four steps, against two and two more in another program that loads what the first one saved.
`kills`: a loop with seeds whose door, coordinator, learner and workers are killed (`kill -9`) at random
times; `kills_equal` of `kills_loops` ended with the weights of the undisturbed one, whose own steps
`antiphon replay` repeats (`replay_exact`).
`throughput`: completions that are asked for at once, against the engine alone on the same prompts
(`gateway_share`), the door's CPU time for each call, and how often the client asks for what takes half a
minute (`polls_per_future`).

    .venv/bin/python benchmarks/door.py --only recipes kills
"""

import argparse
import os
from pathlib import Path
from typing import Any

from antiphon.benchmarks.parts.door.arithmetic import make_model
from antiphon.benchmarks.parts.door.exactness import chunks, kills, resumed, unbroken
from antiphon.benchmarks.parts.door.losses import loss_error_worst
from antiphon.benchmarks.parts.door.recipes import Recipes, compare, own_loop
from antiphon.benchmarks.parts.door.throughput import slow_future, throughput
from antiphon.benchmarks.parts.own_environment import MissingToolError
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish

PARTS = ("recipes", "losses", "chunks", "resume", "kills", "throughput")
LEAST = {"arithmetic_share": 0.9, "gateway_share": 0.9}
MOST = {"kl_sample_train": 2e-4, "cpu_ms_per_call": 3.0, "polls_per_future": 2.0}
EXACT = {"loss_error_worst": 1e-6}
TRUE = ("chunks_equal", "twice_equal", "resume_equal")


def main() -> int:
    """Measure the parts that are asked for."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--model", type=Path, help="folder that has the model for arithmetic, or gets it")
    parser.add_argument("--steps", type=int, default=20, help="of math_rl and of the loop of ours")
    parser.add_argument("--prompts", type=int, default=32, help="of such a step")
    parser.add_argument("--kills", type=int, default=12, help="processes that are killed")
    parser.add_argument("--kill-steps", type=int, default=20, help="of the loop that is killed and replayed")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed, and when")
    parser.add_argument("--calls", type=int, default=64, help="completions asked for at once")
    parser.add_argument("--rounds", type=int, default=5, help="of these")
    given = parser.parse_args()
    result: dict[str, Any] = {}
    if "losses" in given.only:
        result["loss_error_worst"] = loss_error_worst()
    missing = []
    try:
        result |= with_clients(given)
    except MissingToolError as reason:
        missing = [f"nothing was measured with clients: {reason}"]
    return finish(result, record=given.record, violated=broken(result), at_size=[*missing, *short(result)])


def with_clients(given: argparse.Namespace) -> dict[str, Any]:
    """Measure the parts in which programs of clients run.

    Raises:
        MissingToolError: when their environments cannot be made.
    """
    result: dict[str, Any] = {}
    if "chunks" in given.only:
        result |= chunks()
    if "resume" in given.only:
        result |= resumed()
    if "kills" in given.only:
        expected, replayed = unbroken(given.kill_steps)
        result |= replayed
        if given.kills:
            result |= kills(given.kills, given.kill_steps, expected, given.seed)
    if "throughput" in given.only:
        result |= throughput(given.calls, given.rounds) | slow_future()
    if "recipes" in given.only:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "antiphon"
        model = make_model(given.model or cache / "arithmetic")
        recipes = Recipes(model, given.steps, given.prompts)
        recipes.run()
        result |= recipes.figures()
        if recipes.curves:
            result |= compare(recipes.curves, own_loop(model, given.steps, given.prompts))
    return result


def broken(result: dict[str, Any]) -> list[str]:
    """Return a sentence for everything that must hold at any size and does not."""
    found = [f"{name} does not hold" for name in TRUE if not result.get(name, True)]
    found += [f"{name} is {result[name]:g}" for name, most in EXACT.items() if result.get(name, 0.0) > most]
    if result.get("recipes_ok") != result.get("recipes"):
        found.append(f"{result['recipes_ok']} of {result['recipes']} recipes ran to their end")
    if result.get("unserved"):
        found.append(f"{result['unserved']} calls were not served: {result['unserved_calls']}")
    if result.get("replay_exact", 1.0) < 1.0:
        found.append(f"{result['replay_exact']:.1%} of the steps repeat bit for bit, not all")
    if result.get("kills_equal") != result.get("kills_loops"):
        found.append(
            f"{result['kills_equal']} of {result['kills_loops']} killed loops ended with equal weights"
        )
    return found


def short(result: dict[str, Any]) -> list[str]:
    """Return a sentence for everything that misses its bound."""
    low = [
        f"{name} is {result[name]}, at least {least:g} was asked"
        for name, least in LEAST.items()
        if name in result and result[name] < least
    ]
    high = [
        f"{name} is {result[name]}, at most {most:g} was asked"
        for name, most in MOST.items()
        if name in result and not (result[name] or 0.0) <= most
    ]
    return low + high


if __name__ == "__main__":
    execute(main)
