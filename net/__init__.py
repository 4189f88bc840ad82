"""Messages and back: records on the wire, calls and their retry, keys and guard. It knows no stage."""
