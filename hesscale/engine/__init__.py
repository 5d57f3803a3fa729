"""The backward pass that computes gradients and Hessian diagonals together.

Read the modules in the order in which a pass goes through them:

1. ``nodes``: autograd's graph as PyTorch builds it, and vector-Jacobian products through it.
2. ``dispatch``: which rule applies to each node.
3. ``head_structure``: the part of the graph between loss and outputs, and where its rules are not exact.
4. ``schedule``: which nodes get a hook and what it does, decided once for all graphs of one structure.
5. ``head_values``: exact diagonals in the head, by double backward. ``block_structure`` caches the structure of these Hessians.
6. ``propagate``: what the hooks do, from the loss to the leaves.
7. ``backward``: the functions that users call.

``examples/hesscale_from_scratch.py`` implements the same recursion for an MLP, in four equations.
"""
