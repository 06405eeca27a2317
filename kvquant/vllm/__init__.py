"""The attention backend of vLLM: quantized rows in vLLM's own pages."""
