"""The gRPC server: calls, the step link, and the threads that run steps and send results."""
