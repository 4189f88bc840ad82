"""Runs environments that others have published for an Antiphon run, in a virtual environment of their own.

Needs the standard library and what the environment brings; knows a run by its token gateway alone.
"""
