"""`lit-probattn ask`: predicted cost of every variant at given sizes."""
