"""The step link measured: how long an executor waits for its scheduler."""
