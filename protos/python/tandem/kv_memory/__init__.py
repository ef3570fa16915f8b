"""How much KV memory a device has room for: for the executor, and for those who ask beforehand."""
