"""Tables of studies of trained models: runs, studies, comparison with printed numbers."""
