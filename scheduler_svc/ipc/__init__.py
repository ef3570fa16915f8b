"""Messages and sockets between the core process and its frontend processes."""
