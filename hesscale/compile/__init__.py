"""Whole training steps as compiled graphs."""
