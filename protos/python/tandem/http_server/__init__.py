"""HTTP server processes in front of schedulers; needs uvicorn, which the services do not."""
