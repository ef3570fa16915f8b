"""The client of an executor: connection, handshake, session, and the checks of what comes back."""
