"""Property-based fuzzing of every reader and of the command line.

    python -m tests.fuzzing --seconds 300        all targets, that long in all
    python -m tests.fuzzing --seconds 60 ts      one of them

Each example is a sound input with random edits. A target holds that the answer is a clear error of
one line or correct data, judged by an independent reading; never another exception, a hang, or data
that are silently wrong.
"""
