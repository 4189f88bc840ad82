"""gRPC: servers, channels, errors, retries, and the same calls without sockets."""
