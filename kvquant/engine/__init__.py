"""Rows in an engine's pages, and its steps; imports no engine."""
