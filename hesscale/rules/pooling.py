"""Pooling, interpolation, padding by reflection and its like, dropout: linear maps between neighbouring entries."""
