"""Running text: words and sub-words, WikiText-103, masked language models."""
