"""Results of simulations: summaries, comparisons, printed text and plots."""
