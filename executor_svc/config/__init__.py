"""Settings of an executor and what follows from them: engine limits, sizes of graphs."""
