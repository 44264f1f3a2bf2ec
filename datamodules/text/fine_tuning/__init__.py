"""Data of fine-tuning: questions about texts, texts and pairs of them with labels."""
