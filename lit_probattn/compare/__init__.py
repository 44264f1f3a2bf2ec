"""Sets of trainings as resumable cells: what is trained, run, predicted, reported."""
