"""Blocks of the KV cache: the pool, the prefix cache, blocks in host memory."""
