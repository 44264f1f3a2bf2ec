"""What a conversion of attention is worth, over the steps of fine-tuning after it."""
