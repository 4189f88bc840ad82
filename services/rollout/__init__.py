"""Rollout worker: leases groups, samples them, hands them in, swaps weights between groups."""
