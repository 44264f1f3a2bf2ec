"""What all data modules share: batches, order, caches, loaders, errors."""
