"""Tables whose numbers come from studies of trained models: cells, studies, printed beside ours."""
