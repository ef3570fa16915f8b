"""Keyword arguments of a call and the messages that they become."""

from tandem_client.request.build import build_request, detokenize_request, tokenize_request

__all__ = ["build_request", "detokenize_request", "tokenize_request"]
