"""Answers of OpenAI's API: whole ones and streams of server-sent events."""
