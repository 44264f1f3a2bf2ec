"""Operations, parameters and memory: closed forms, and counts of models."""
