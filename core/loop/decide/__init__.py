"""Decisions: what each call to the coordinator does to the state of the loop, and what it answers."""
