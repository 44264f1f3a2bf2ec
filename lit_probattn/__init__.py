"""PyTorch Lightning experiments with probabilistic and head-sharing attention."""
