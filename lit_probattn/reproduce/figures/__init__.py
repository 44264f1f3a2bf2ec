"""Published figures: runs to train, a figure with the paper's axes, judged sentences."""
