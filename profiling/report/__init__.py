"""Reports of finished sweeps: ratios, tables, figures, a page."""
