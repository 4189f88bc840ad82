"""Turns: what conversations cost, against single turns of as many tokens.

Whole jobs with a random policy, which nearly never ends a turn itself, so each side samples the same tokens.
They sample one batch, so that no learner computes beside the engine. `throughput_share` is the tokens per
second of conversations of four turns over those of one turn of four times as many tokens, at the same number
of places (64 trajectories at once), with an environment that answers at once; `throughput_share_slow` with
one that takes 200 ms, at twice the places; `gateway_share` has a host answer over HTTP
(`parts/small_host.py`), over those of the environment of ours. Seconds go from the first lease to the last
submission. `turn_p50_ms` and `turn_p99_ms` are from the end of a turn in the engine to its next request
there, as the worker measured them. Medians of repeated jobs, which take turns. `beside_training` has the
waits of conversations while the learner takes `--steps` steps on the same cores.

`host_turns_per_cpu_s` is what the program for hosts serves of a game with two seats (`parts/host_turns.py`).

Before that `--book-steps` steps of the production loop with random tokens, for each of three renderers:
`turns` of them, `rendered_twice` tokens of requests that were other ones than before, and `rows_different`
trajectories that trained on another token, mask, version or log-probability than a second account says. The
script fails when there is any.

Then `--drafts` conversations of fixed mode are played twice with the policy of `examples/game.yaml`, with
drafts from history and without: `drafts_changed` rows differ. At last `--kills` workers, as many processes of
the environment and as many hosts (`parts/small_host.py`) are killed in runs of that example
(`parts/turn_kills.py`): trajectories that were `lost`, trained `twice`, observed something `wrong`, or
`failed`, and tokens that were `sampled_again` though they were known.

    .venv/bin/python benchmarks/turns.py
"""

import asyncio
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from antiphon.benchmarks.parts.host_turns import host_turns_per_cpu_s
from antiphon.benchmarks.parts.measure import PROJECT, journal_events, run_job, scratch_home
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.benchmarks.parts.turn_bookkeeping import MARKERS, bookkeep
from antiphon.benchmarks.parts.turn_kills import FAULTS, GROUP, HOSTED, OWN, SMALL_HOST, kill_turns, read_run
from antiphon.core.loop.events import BatchSealed

CONFIG = PROJECT / "examples" / "game.yaml"
TURNS, TURN_TOKENS, PLACES = 4, 32, 8
PROMPTS, BATCH_PROMPTS = 32, 64
"""Of a step of the runs with and without drafts; of the batch that is sampled without a learner."""
ANSWER_MS = 200
RUN_S = 900.0
"""Longest run."""
BOUNDS = {
    "throughput_share": (0.8, None),
    "throughput_share_slow": (0.7, None),
    "gateway_share": (0.9, None),
    "host_turns_per_cpu_s": (50.0, None),
    "turn_p50_ms": (None, 30.0),
    "turn_p99_ms": (None, 150.0),
}
"""At least and at most."""

SHARES = {
    "throughput_share": ("turns", "single"),
    "throughput_share_slow": ("slow", "single"),
    "gateway_share": ("gateway", "turns"),
}
"""Sides whose tokens per second are compared, the second one being the whole."""

NONE = ("rendered_twice", "rows_different", "drafts_changed", *FAULTS)
"""What must be 0."""

CONVERSATIONS = f"environment.parameters={{turns: {TURNS}}}", f"sampling.max_tokens={TURN_TOKENS}"
ONE_BATCH = "run.steps=1", f"loop.prompts_per_step={BATCH_PROMPTS}"
SIDES = {
    "single": (*ONE_BATCH, "environment.parameters={turns: 1}", f"sampling.max_tokens={TURNS * TURN_TOKENS}"),
    "turns": (*ONE_BATCH, *CONVERSATIONS),
    "gateway": (
        *ONE_BATCH,
        *CONVERSATIONS,
        *HOSTED,
        f"environment.host_command=[{sys.executable}, {SMALL_HOST}, '{2 * PLACES}']",
    ),
    "training": CONVERSATIONS,
    "slow": (
        *ONE_BATCH,
        f"environment.parameters={{turns: {TURNS}, answer_ms: {ANSWER_MS}}}",
        f"sampling.max_tokens={TURN_TOKENS}",
        f"rollout.concurrent_groups={2 * PLACES}",
    ),
}


def common(policy: Path, steps: int) -> list[str]:
    """Return what all sides have in common."""
    return [
        f"model.path={policy}",
        f"run.steps={steps}",
        "environment.name=antiphon.benchmarks.parts.talk:Talk",
        f"environment.max_turns={TURNS}",
        "loop.prompts_per_step=16",
        "loop.max_staleness=4",
        "loop.run_ahead=bound",
        "loop.filter=none",
        "learner.learning_rate=1e-9",
        "drafting.enabled=false",
        "evaluation.interval=0",
        "evaluation.prompts=1",
        f"rollout.concurrent_groups={PLACES}",
        "rollout.max_model_tokens=512",
    ]


def figures(run_dir: Path) -> dict[str, float]:
    """Return what one job sampled each second, and how long its turns waited."""
    begun, ended, tokens, turns = 0.0, 0.0, 0, 0
    for kind, body in journal_events(run_dir / "journal.db"):
        if kind == "lease.granted":
            begun = begun or body["at_s"]
        elif kind == "group.submitted":
            ended, tokens = body["at_s"], tokens + sum(body["token_counts"])
        turns += kind == "turn.answered"
    found = {"tokens_per_s": tokens / (ended - begun), "turns": float(turns)}
    for log in sorted((run_dir / "logs").glob("worker*")):
        for line in log.read_text().splitlines():
            if "turns.waited" in line:
                found |= {f"{name}_ms": 1000.0 * float(s) for name, s in re.findall(r"(p\d+)_s=(\S+)", line)}
    return found


def main() -> int:
    """Run the jobs and compare them."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="learner steps of the job that trains")
    parser.add_argument("--rounds", type=int, default=2, help="jobs of each side")
    parser.add_argument("--book-steps", type=int, default=4, help="steps with each renderer")
    parser.add_argument("--drafts", type=int, default=2000, help="conversations with and without drafts")
    parser.add_argument("--host-groups", type=int, default=60, help="groups that the program for hosts plays")
    parser.add_argument("--kills", type=int, default=50, help="processes of each kind that are killed")
    parser.add_argument("--kill-steps", type=int, default=40, help="steps of a run in which they are")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    booked = {"turns": 0, "rendered_twice": 0, "rows": 0, "rows_different": 0}
    with scratch_home() as home:
        for renderer in MARKERS:
            account, rows, different = asyncio.run(bookkeep(home / renderer, renderer, arguments.book_steps))
            for name, count in zip(
                booked, (account.turns, account.rendered_twice, rows, different), strict=True
            ):
                booked[name] += count
            print(f"{renderer}: {booked}", flush=True)
        policy = make_policy(home / "policy")
        for number in range(arguments.rounds):
            for side, words in SIDES.items():
                given = [*common(policy, arguments.steps), *words]
                run_job(home, CONFIG, given, f"{side}-{number}", RUN_S, untaught=True)
                newest = max((home / "runs").iterdir(), key=lambda folder: folder.stat().st_ctime)
                found[side].append(figures(newest))
                print(f"{side}: {found[side][-1]}", flush=True)

    def middle(side: str, name: str) -> float:
        return median(one[name] for one in found[side])

    shares = {
        name: [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(found[side], found[other], strict=True)]
        for name, (side, other) in SHARES.items()
    }
    drafted = compare_drafts(arguments.drafts) if arguments.drafts else {}
    killed = Counter[str]()
    for kinds, whose in ((("worker", "environment"), OWN), (("host",), HOSTED)):
        killed.update(kill_turns(arguments.kills, arguments.kill_steps, kinds, whose, seed=0))
    result: dict[str, Any] = {
        **booked,
        **drafted,
        **dict.fromkeys(FAULTS, 0),
        **killed,
        "kills": killed["worker_kills"] + killed["environment_kills"],
        "turns_of_jobs": sum(one["turns"] for side in found.values() for one in side),
        **{name: round(median(each), 4) for name, each in shares.items()},
        "shares": {name: [round(share, 4) for share in each] for name, each in shares.items()},
        "tokens_per_s": {side: round(middle(side, "tokens_per_s"), 1) for side in SIDES},
        "turn_p50_ms": round(middle("turns", "p50_ms"), 2),
        "turn_p99_ms": round(middle("turns", "p99_ms"), 2),
        "beside_training": {name: round(middle("training", f"{name}_ms"), 2) for name in ("p50", "p99")},
        "host_turns_per_cpu_s": round(host_turns_per_cpu_s(arguments.host_groups), 1),
    }
    violated = [
        f"{name} is {result[name]}, {words} {limit:g} was asked"
        for name, (least, most) in BOUNDS.items()
        for words, limit, wrong in (
            ("at least", least, least is not None and result[name] < least),
            ("at most", most, most is not None and result[name] > most),
        )
        if wrong
    ]
    wrong = [f"{result[name]} {name}" for name in NONE if result.get(name)]
    return finish(result, record=arguments.record, violated=wrong, at_size=violated)


def compare_drafts(conversations: int) -> dict[str, int]:
    """Sample the same conversations of fixed mode with and without drafts and count the rows that differ."""
    overrides = [
        f"run.steps={-(-conversations // (PROMPTS * GROUP))}",
        f"loop.prompts_per_step={PROMPTS}",
        f"loop.group_size={GROUP}",
        f"environment.train_size={2 * PROMPTS}",  # from the third step on each prompt has a history
        "loop.mode=fixed",
        "loop.filter=none",
        "evaluation.interval=0",
        "evaluation.prompts=1",
        "drafting.probe_steps=16",
    ]
    rows, accepted = [], 0
    for drafts in ("true", "false"):
        with scratch_home() as home:
            given = [*overrides, f"drafting.enabled={drafts}"]
            run_job(home, CONFIG, given, f"drafts-{drafts}", RUN_S, untaught=True)
            events, own = read_run(home)
            sealed = [event.drafting for event in events if isinstance(event, BatchSealed)]
            accepted += sum(one.accepted for one in sealed if one is not None)
            rows.append(own)
    changed = sum(
        not (np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs))
        for a, b in zip(*rows, strict=True)
    )
    found = {"drafts_conversations": len(rows[0]), "drafts_accepted": accepted, "drafts_changed": changed}
    print(f"drafts: {found}", flush=True)
    return found


def make_policy(out: Path) -> Path:
    """Write a random policy with the tokenizer of the examples with turns, and return its directory."""
    from antiphon.benchmarks.parts.warmstart.chat_tokenizer import build_chat_tokenizer
    from antiphon.benchmarks.parts.warmstart.tiny_model import ModelShape, build_model, save_tiny_model
    from antiphon.benchmarks.parts.warmstart.turns import ENDS

    tokenizer = build_chat_tokenizer()
    model = build_model(ModelShape(vocabulary=len(tokenizer)), seed=0)
    model.config.eos_token_id = tokenizer.convert_tokens_to_ids(ENDS)
    save_tiny_model(model, tokenizer, out)
    return out


if __name__ == "__main__":
    execute(main)
