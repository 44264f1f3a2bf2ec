"""Basis of all packages: files, locks, errors, processes, allowed code, internals of PyTorch."""
