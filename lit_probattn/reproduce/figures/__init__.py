"""Published figures: cells that are trained, a picture in the paper's axes, its sentences judged."""
