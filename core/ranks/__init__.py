"""Ranks: how the processes that train one model share its work."""
