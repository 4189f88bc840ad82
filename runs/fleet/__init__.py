"""Launchers: one port, and an engine of others behind each."""
