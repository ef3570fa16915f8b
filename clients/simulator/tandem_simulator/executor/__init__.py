"""Modelled executor: the duration of its steps and the tokens that they give."""
