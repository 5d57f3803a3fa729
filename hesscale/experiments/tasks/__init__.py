"""What optimizers are compared on: data sets with networks, and one trainer for all of them."""
