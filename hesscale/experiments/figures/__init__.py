"""The paper's experiments, one file per family of figures; each has an ``EXPERIMENT``."""
