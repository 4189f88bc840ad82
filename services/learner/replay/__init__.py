"""Replay: recorded steps and rollouts executed again from artifacts."""
