"""The earlier name of :mod:`hesscale.optim.nonfinite`, for pickles of optimizers from earlier versions."""

from .nonfinite import Watch

__all__ = ["Watch"]
