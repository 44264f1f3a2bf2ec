"""Shared parts of all data modules: batches, order, caches, loaders."""
