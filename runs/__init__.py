"""One run on this machine, without Prefect: folder, processes, clients, outcome."""
