"""CPU: where a job spends its CPU seconds, by process and by function, and what its start waits for."""
