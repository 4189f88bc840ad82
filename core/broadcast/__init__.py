"""Weights on their way to the workers: what changes between versions, and which bytes to send."""
