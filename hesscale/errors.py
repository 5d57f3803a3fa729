"""Errors and warnings that hesscale raises."""

from __future__ import annotations


class UnsupportedOperator(RuntimeError):
    """An operator has no curvature rule, or its rule does not cover this use of the operator.

    It is raised before any ``.grad`` or ``.hess_diag`` changes.
    """


class CurvatureWarning(UserWarning):
    """The diagonal may not be what you expect. For example, it is not exact at the model's outputs."""


class NonFiniteError(FloatingPointError):
    """A gradient or Hessian diagonal is not finite. If an optimizer raised this error, it has skipped the step."""


class CompileWarning(UserWarning):
    """A step of :func:`hesscale.compile_step` is correct, but it is not fully compiled and so runs more slowly."""


class NeedsEagerPass(RuntimeError):
    """Tracing needs information that only an eager pass with real numbers can provide. Run one, and then trace again."""
