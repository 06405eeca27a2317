"""A plugin of SGLang: attention over quantized rows in SGLang's own memory pool."""
