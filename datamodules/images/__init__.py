"""Image data sets: ImageNet and class folders, samples, batches."""
