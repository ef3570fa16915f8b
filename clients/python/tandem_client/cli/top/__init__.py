"""`tandem top`: rates, table and live view of a running server."""
