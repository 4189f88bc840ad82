"""Decisions of the coordinator: what each call does to the state of the loop, and what it answers."""
