"""Size of the KV memory that fits a device, for the executor and for `tandem config suggest`."""
