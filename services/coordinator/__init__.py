"""Coordinator: leases, the staleness gate, the group buffer and the journal."""
