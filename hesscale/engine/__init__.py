"""The backward pass that computes gradients and Hessian diagonals together."""
