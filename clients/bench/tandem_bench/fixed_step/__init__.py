"""Executor without a model: the real server and step link, with steps of a fixed time."""
