"""Benchmarks of the services, of their parts and of whole engines; `tandem bench` runs them."""
