"""The commands of `kvquant`, one module each."""
