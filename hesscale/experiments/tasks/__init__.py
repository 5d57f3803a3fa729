"""The tasks on which optimizers are compared: data sets with networks, and one trainer for all of them."""
