"""Frontend processes: their start, their watch, their settings and the scratch folder."""
