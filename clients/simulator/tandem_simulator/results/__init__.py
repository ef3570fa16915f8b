"""Results of simulations: recorded, summed up, printed and drawn."""
