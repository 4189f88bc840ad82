"""What benchmark scripts share: runs that are measured, a PostgreSQL server, recorded runs."""
