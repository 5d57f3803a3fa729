"""Reductions: sums, means, variances, norms, extrema, sorting."""
