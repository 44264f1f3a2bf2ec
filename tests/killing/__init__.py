"""Programs that show at length what the tests show in short."""
