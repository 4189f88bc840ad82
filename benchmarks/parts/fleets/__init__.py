"""Engines of a fleet as they are set up on one machine."""
