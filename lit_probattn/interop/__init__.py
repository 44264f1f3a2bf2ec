"""This package's attention in models of other libraries."""
