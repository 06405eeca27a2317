"""The version, which __init__ shows as kvquant.__version__."""

__version__ = "0.1.0"
