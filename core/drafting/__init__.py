"""Drafting from history (HistoSpec): what may come next, and whether guessing pays."""
