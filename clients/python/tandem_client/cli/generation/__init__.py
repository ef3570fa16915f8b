"""`tandem generate` and `tandem chat`: text from a model in the terminal."""
