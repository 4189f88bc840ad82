"""Migrations: each brings a journal one schema forward, inside the transaction of whoever opens it."""
