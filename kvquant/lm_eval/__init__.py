"""A model of lm-evaluation-harness that decodes from a quantized cache."""
