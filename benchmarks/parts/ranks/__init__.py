"""Parts of the rank benchmark: the program of a rank, and a run of it under the supervisor."""
