"""Studies of trained models: `lit-probattn analyse STUDY …`.

A study reads a checkpoint and data, and writes a report.
`registry.STUDIES` lists them; `trained.open_trained` rebuilds model and data; `recording.record`
records the inputs of all attention layers of a model.
"""
