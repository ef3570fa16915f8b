"""
The device service: weights, KV memory, kernels, sampling; a cache that can be rebuilt from
admissions.
"""
