"""What several commands use: their options, their output on the screen, failures, and waiting."""
