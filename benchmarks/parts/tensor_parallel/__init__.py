"""Parts of the benchmark of tensor parallel engines."""
