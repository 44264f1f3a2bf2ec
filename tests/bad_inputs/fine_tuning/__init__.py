"""Bad inputs of fine-tuning."""
