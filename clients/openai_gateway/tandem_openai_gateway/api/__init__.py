"""Requests of OpenAI's API: their fields, their checks, and the Tandem requests they become."""
