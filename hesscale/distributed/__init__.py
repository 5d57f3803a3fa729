"""Distributed training: Hessian diagonals are averaged like the gradients, or an error is raised.

``averaging`` averages diagonals under DistributedDataParallel, and ``fully_sharded`` reduce-scatters them under ``fully_shard``.
``sharding`` raises errors for what FSDP and DTensors do not support. ``shards`` has helpers for optimizers of DTensors, and
``draws`` seeds random estimates. These modules deal with parameters and PyTorch's wrappers, not with how a diagonal is computed.
"""
