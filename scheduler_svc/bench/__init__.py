"""What one turn of the scheduler costs, without sockets and without an executor."""
