"""Remembered lengths, and the order in which groups are leased by them."""
