"""Tables of studies of trained models: cells, studies, comparison with printed numbers."""
