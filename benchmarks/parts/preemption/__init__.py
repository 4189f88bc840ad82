"""Parts of the preemption benchmark: fleets, schedules of reclaims, reward curves."""
