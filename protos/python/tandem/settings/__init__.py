"""
Settings of a service process: one schema, four sources. For the services alone: clients and pure
cores do without it.
"""
