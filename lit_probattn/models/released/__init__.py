"""Models as released code builds them, where that is not what a paper says."""
