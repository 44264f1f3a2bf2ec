"""Time series: the UEA archive, user files, batches."""
