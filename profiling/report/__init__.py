"""Reports of finished sweeps: ratios, tables, figures and the page."""
