"""What everything that is run many times shares: expectations and their verdicts."""
