"""The KV cache in device and host memory, and the plan of its size."""
