"""Ranks: the processes that train one model together."""
