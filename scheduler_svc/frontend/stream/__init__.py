"""Stream of one call: output that arrives from the core, and messages that go to the client."""
