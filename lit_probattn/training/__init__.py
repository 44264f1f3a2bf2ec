"""Training infrastructure: run folder, record, logs, checkpoints, callbacks, preemption, memory."""
