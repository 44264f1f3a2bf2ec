"""Fine-tuning of text encoders: question answering, text and text-pair classification."""
