"""Several processes that train one model: Hessian diagonals are averaged like the gradients, or an error is raised.

``averaging`` averages diagonals under DistributedDataParallel, ``sharding`` raises an error for FSDP and DTensors, and ``draws``
seeds random estimates. These modules deal with parameters and PyTorch's wrappers, not with how a diagonal is computed.
"""
