"""Parity: the demo's recipe here and in TRL, judged by one evaluator."""
