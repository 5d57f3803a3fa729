"""Uses of a Hessian diagonal besides optimization: inspecting curvature, pruning, quantization and others.

Each module is built on the public functions of this package alone. :mod:`hesscale.uses.laplace` needs laplace-torch, and is
imported by itself.
"""

from . import continual, pruning, quantization
from .derivatives import Averages, Derivatives, mean_derivatives
from .inspection import inspect
from .report import CurvatureReport

__all__ = ["Averages", "CurvatureReport", "Derivatives", "continual", "inspect", "mean_derivatives", "pruning", "quantization"]
