"""HTTP server with OpenAI's API in front of one or several Tandem schedulers."""
