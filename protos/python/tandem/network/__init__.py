"""Addresses, and the settings and queues of gRPC that services and clients share."""
