"""The test split during training, and evaluation in the authors' way."""
