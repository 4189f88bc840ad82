"""Long-running gRPC services: api, service, server and client, the same in each room."""
