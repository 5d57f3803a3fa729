"""Indexing, gathering and scattering: 0/1 maps chosen by data."""
