"""One model on several processes, its ranks: what each holds, and how they compute together."""
