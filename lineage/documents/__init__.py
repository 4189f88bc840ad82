"""Documents: what every artifact of a run came from, and the graph they form."""
