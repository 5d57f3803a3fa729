"""Several processes that train one model: Hessian diagonals are averaged with the gradients, or refused.

``averaging`` serves DistributedDataParallel, ``sharding`` refuses FSDP, and ``draws`` makes random estimates fit together. These
modules know parameters and PyTorch's wrappers; they do not know how a diagonal is computed.
"""
