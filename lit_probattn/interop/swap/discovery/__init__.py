"""Discovery of a model's attention calls and their weights, by one run of an example."""
