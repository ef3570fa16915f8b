"""Parts that several commands share: options, output on the screen, failures, and waiting."""
