"""Drafting in the rollout engine: what is drafted at each step of vLLM."""
