"""Around a task: run folder, record, logs, checkpoints, callbacks, preemption, memory."""
