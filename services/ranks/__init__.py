"""Ranks: processes that compute together, how they are started and what they tell each other."""
