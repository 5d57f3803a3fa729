"""Workarounds for bugs of PyTorch, one file for each."""
