"""what pages are made of: Markdown, tables, figures, HTML. Imports `base` alone of ours."""
