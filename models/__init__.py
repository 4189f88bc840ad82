"""A Hugging Face model directory: its tokenizer and the shape of its checkpoint."""
