"""Planning a step: prefills, decodes, preemption, and the batch that is sent."""
