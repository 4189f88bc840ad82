"""Preemption in virtual time: a simulated fleet around production coordinator, workers and reward service."""

from collections.abc import Sequence

from antiphon.benchmarks.parts.preemption.fleet import FleetRun, Site, shares, steps_per_hour
from antiphon.benchmarks.parts.preemption.schedule import Stay, as_faults
from antiphon.simulator.world import World


def simulate_fleet(site: Site, stays: Sequence[Stay], span_s: float, seed: int) -> FleetRun:
    """Simulate one fleet; the witness checks every token, bound and acknowledgement on the way."""
    faults = [*as_faults(stays, site.workers), *site.trouble(span_s)]
    world = World(site.scenario(seed, span_s), seed, faults)
    outcome = world.run()
    coordinator = world.shared.state_machines[-1]
    wasted, preempted = shares(coordinator.state.work_accounts.account(coordinator.clock()))
    rows = list(world.shared.journal.written())
    return FleetRun(
        steps_per_hour=steps_per_hour([at_s for at_s, _ in world.witness.commits], site.train_s, span_s),
        wasted_share=wasted,
        preempted_share=preempted,
        continued=sum(row.kind == "lease.granted" and '"continued":0' not in row.body for row in rows),
        violations=outcome.violations,
        hung_leases=sum(row.kind == "lease.expired" and '"hung":true' in row.body for row in rows),
    )
