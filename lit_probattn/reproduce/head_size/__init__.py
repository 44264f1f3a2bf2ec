"""The head-size experiment: grids of models with equal head size or equal parameters."""
