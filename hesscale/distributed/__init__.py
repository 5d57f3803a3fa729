"""Several processes that train one model: Hessian diagonals are averaged like the gradients, or an error is raised.

``averaging`` averages diagonals under DistributedDataParallel, ``fully_sharded`` divides them under ``fully_shard``, ``sharding``
raises an error for what is not supported of FSDP and DTensors, ``shards`` has what optimizers need of DTensors, and ``draws``
seeds random estimates. These modules deal with parameters and PyTorch's wrappers, not with how a diagonal is computed.
"""
