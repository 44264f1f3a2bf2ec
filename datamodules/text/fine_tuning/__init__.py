"""Data for fine-tuning: question answering, labelled texts and text pairs."""
