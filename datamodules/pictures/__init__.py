"""ImageNet: release files, samples, batches."""
