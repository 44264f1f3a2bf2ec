"""Published tables and figures, each reproduced and compared by one resumable command."""
