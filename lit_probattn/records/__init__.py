"""Building blocks of pages: Markdown, tables, figures, HTML. Imports only `base`."""
