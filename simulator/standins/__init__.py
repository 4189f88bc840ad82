"""Seeded stand-ins for the engines; all else in a simulated process is production code."""
