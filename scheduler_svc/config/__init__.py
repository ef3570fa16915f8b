"""Settings of the service and of scheduling, from files, environment and flags."""
