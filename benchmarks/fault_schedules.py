"""Fault schedules: how many simulated runs hold their promises, and how fast one core checks them.

Each seed is a whole run under virtual time with its own configuration, fleet and faults; the parties that
take part are production's, with its guard, audits and state machine, and some that lie. Then production code
is broken on purpose, in each of the ways of `benchmarks/parts/mutations.py`; `mutants_surviving` counts those
that no seed saw. `cpu_s` and `wall_s` are those of the seeds, `mutants_s` of the rest.

    .venv/bin/python benchmarks/fault_schedules.py --seeds 1000
"""

import time

import pytest

from antiphon.benchmarks.parts.mutations import MUTATIONS, survives
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.simulator.campaign import Campaign, mute_logs
from antiphon.simulator.report import Summary, failure_lines


def main() -> int:
    """Simulate the seeds of the command line; the exit code is 1 when one found something."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--no-mutants", action="store_true", help="leave the broken code out")
    arguments = parser.parse_args()
    mute_logs()
    campaign, summary = Campaign(), Summary()
    wall, cpu = time.perf_counter(), time.process_time()
    for outcome in campaign.seeds(range(arguments.first, arguments.first + arguments.seeds)):
        summary.add(outcome)
        if outcome.violations:
            print("\n".join(failure_lines(outcome, "")), flush=True)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    for line in summary.lines():
        print(line)
    result: dict[str, object] = {
        "seeds": summary.seeds,
        "violations": summary.violations,
        "events_per_s": round(summary.events / cpu_s),
        "seeds_per_s": round(summary.seeds / cpu_s, 2),
        "cpu_s": round(cpu_s, 1),
        "wall_s": round(wall_s, 1),
        "events": summary.events,
        "messages": summary.messages,
        "faults": summary.faults,
        "restarts": summary.restarts,
        "virtual_hours": round(summary.virtual_s / 3600, 1),
        "slowest_recovery_s": round(summary.slowest_recovery_s, 1),
        "failing": summary.failing,
        "parties": summary.parties,
        "liars_shut_out": summary.shut_out,
        "edited_groups_trained": summary.edited,
    }
    violated = [f"{len(summary.failing)} seeds break a promise"] if summary.failing else []
    if not arguments.no_mutants:
        begun, surviving = time.perf_counter(), _surviving()
        result |= {"mutants": len(MUTATIONS), "mutants_surviving": len(surviving)}
        result["mutants_s"] = round(time.perf_counter() - begun, 1)
        violated += [f"no seed saw that {name.replace('_', ' ')}" for name in surviving]
    return finish(result, record=arguments.record, violated=violated)


def _surviving() -> list[str]:
    """Return the names of the mutations that no seed saw."""
    found = []
    for mutation in MUTATIONS:
        with pytest.MonkeyPatch.context() as patch:
            if survives(mutation, patch) is not None:
                found.append(mutation.__name__)
    return found


if __name__ == "__main__":
    execute(main)
