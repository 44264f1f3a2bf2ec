"""Fine-tuning of encoders of text: questions about a text, and classes of texts or pairs."""
