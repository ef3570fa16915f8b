"""The KV cache in device and host memory, and how much of it there is room for."""
