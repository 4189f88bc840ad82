"""Fault schedules: how many simulated runs hold their promises, and how fast one core checks them.

Each seed is a whole run under virtual time with its own configuration, fleet and faults. The last
line is one JSON object: seeds, violations, events_per_s and what was simulated.
"""

import sys
import time

from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.simulator.campaign import Campaign, mute_logs
from antiphon.simulator.report import Summary, failure_lines


def main() -> int:
    """Simulate the seeds of the command line; the exit code is 1 when one found something."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
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
    result = {
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
    }
    violated = [f"{len(summary.failing)} seeds break a promise"] if summary.failing else []
    return finish(result, record=arguments.record, violated=violated)


if __name__ == "__main__":
    sys.exit(main())
