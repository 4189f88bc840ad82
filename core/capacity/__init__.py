"""Capacity: how much rollout a learner needs, what it costs, and which workers to have, as pure decisions."""
