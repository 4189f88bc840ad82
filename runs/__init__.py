"""The life of a run on this machine, without Prefect: folder, processes, clients, outcome."""
