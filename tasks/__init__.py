"""Prefect tasks: wait on a stage and report it; they move handles, never data."""
