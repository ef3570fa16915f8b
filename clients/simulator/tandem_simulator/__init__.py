"""Simulator: the scheduler core driven by a model of an executor on a virtual clock."""
