"""The demo: two tiny models learn side by side, then one page shows them."""
