"""The journal: events and payloads in SQLite or PostgreSQL."""
