"""Uses of a Hessian diagonal besides optimization: inspecting curvature, pruning, quantization and others.

Each module uses only the public functions of this package. :mod:`hesscale.uses.laplace` needs laplace-torch, and must be imported
explicitly.
"""

from . import continual, pruning, quantization
from .derivatives import Averages, Derivatives, mean_derivatives
from .inspection import inspect
from .report import CurvatureReport

__all__ = ["Averages", "CurvatureReport", "Derivatives", "continual", "inspect", "mean_derivatives", "pruning", "quantization"]
