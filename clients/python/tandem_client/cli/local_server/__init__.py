"""A server on this machine: its services as child processes of a command, and their settings."""
