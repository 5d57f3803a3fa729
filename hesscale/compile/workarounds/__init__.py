"""Faults of PyTorch, each with the code that works around it."""
