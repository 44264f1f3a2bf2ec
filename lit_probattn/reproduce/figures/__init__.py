"""Published figures: cells to train, a figure with the paper's axes, judged sentences."""
