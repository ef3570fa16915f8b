"""One executor on several processes: rank 0 serves and passes every step on, the others follow."""
