"""What hesscale says when it will not guess."""

from __future__ import annotations


class UnsupportedOperator(RuntimeError):
    """A graph node has no curvature rule, or its rule does not cover this use of the operator.

    Raised while the graph is walked, before any ``.grad`` or ``.hess_diag`` changes.
    """


class CurvatureWarning(UserWarning):
    """The diagonal is still what the method defines, but something about it deserves a look."""


class NonFiniteError(FloatingPointError):
    """A gradient or Hessian diagonal is not finite; the optimizer's step was left out."""


class CompileWarning(UserWarning):
    """A step of :func:`hesscale.compile_step` is right, but runs slower than it might."""


class NeedsEagerPass(RuntimeError):
    """Tracing has met something that only a pass in eager mode, with real numbers, can find out. Run one, then trace again."""
