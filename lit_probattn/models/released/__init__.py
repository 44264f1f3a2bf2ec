"""Models as built by released code, where it differs from the paper."""
