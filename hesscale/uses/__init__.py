"""What a Hessian diagonal is for besides optimization: a look at a network's curvature, pruning, quantization and others.

Each module is built on the public functions of this package alone.
"""
