"""The waiting queue: policies, tenants, and advice for a refused caller."""
