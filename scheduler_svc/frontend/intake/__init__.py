"""Intake of messages: what gRPC may hold, and what is decoded of it, with bounds on both."""
