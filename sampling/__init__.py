"""Keyed sampling and its rules, used by the engine, by the audits and by tests."""
