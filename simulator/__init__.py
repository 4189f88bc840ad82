"""The same loop without engines, under virtual time."""
