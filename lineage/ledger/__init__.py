"""The ledger: the DVC-tracked record of a run's artifacts, and its verification."""
