"""The paper's experiments, one file per family of figures. Each file defines an ``EXPERIMENT``."""
