"""Files: caches, sequences, plans and exported tensors as safetensors, and what inspect prints."""
