"""Many requests on one stream: GenerateBatch."""
