"""What a run leaves on disk: provenance, tables, rows. Imports `base` alone of ours."""
