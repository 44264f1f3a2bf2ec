"""What a run leaves on disk: provenance, tables, rows. Imports nothing of ours."""
