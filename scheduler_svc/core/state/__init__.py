"""The state that planning and output processing share."""
