"""What pages are made of: Markdown, tables, pictures, HTML. Imports `base` alone of ours."""
