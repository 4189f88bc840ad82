"""Environments: where prompts come from and who judges the answers."""
