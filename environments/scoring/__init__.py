"""Scoring of answers in processes that can be killed, and what they may do."""
