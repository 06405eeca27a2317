"""An engine of its own pages: their rows, and its steps. No engine is needed, nor imported."""
