"""Reports of what was measured: text for a terminal, and HTML pages that need no other files."""
