"""The backward pass that computes gradients and Hessian diagonals together.

Read the modules in the order in which a pass goes through them:

1. ``nodes``: autograd's graph as PyTorch builds it, and vector-Jacobian products through it.
2. ``dispatch``: which rule serves each node.
3. ``head_structure``: the part of the graph between loss and outputs, and where its rules are not exact.
4. ``schedule``: which nodes get a hook and what it does, decided once for all graphs of one structure.
5. ``head_values``: the exact diagonals in the head, by double backward, with what ``block_structure`` remembers of them.
6. ``propagate``: the hooks at work, from the loss to the leaves.
7. ``backward``: the functions that users call.

``examples/hesscale_from_scratch.py`` is the same for one kind of network, in four equations.
"""
