"""Tails: the loop's production decisions in virtual time, under long-tailed lengths."""
