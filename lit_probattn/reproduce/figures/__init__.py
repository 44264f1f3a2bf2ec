"""Published figures: cells to train, a picture in the paper's axes, its sentences judged."""
