"""`tandem top`: table, keys and live view of a running server."""
