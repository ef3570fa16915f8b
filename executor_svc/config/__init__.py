"""What an executor is told, and what follows from it: settings, engine limits, graph sizes."""
