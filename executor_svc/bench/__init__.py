"""What the executor can measure of itself, without a scheduler and without a checkpoint."""
