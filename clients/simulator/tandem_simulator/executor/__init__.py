"""The modelled executor: how long its steps take, and which tokens they give."""
