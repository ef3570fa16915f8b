"""The whole engine in one process: same core, same runner, no gRPC."""
