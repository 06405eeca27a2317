"""HTML pages that need no other files: figures, tables and words of one look."""
