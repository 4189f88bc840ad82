"""Environments: where prompts come from and what rewards the answers."""
