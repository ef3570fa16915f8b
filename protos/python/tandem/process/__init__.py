"""Start, logging, end and temporary files of a process, the same for every service and command."""
