"""An executor without a model: the real server and step link, steps that take a fixed time."""
