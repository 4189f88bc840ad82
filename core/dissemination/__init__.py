"""Dissemination: how a payload gets to all workers, as pure decisions."""
