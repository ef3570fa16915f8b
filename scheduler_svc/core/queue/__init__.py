"""The waiting queue: policies, tenants, and retry advice for refused requests."""
