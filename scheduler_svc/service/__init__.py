"""The service process: event loop, intake, publisher, and recovery of a lost executor."""
