"""`tandem up`: its flags, its start, and what it says."""
