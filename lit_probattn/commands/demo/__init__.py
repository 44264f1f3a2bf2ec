"""The demo: train two tiny models and compare them on one page."""
