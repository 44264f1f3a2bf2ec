"""The UEA archive: time series, their .ts files and batches."""
