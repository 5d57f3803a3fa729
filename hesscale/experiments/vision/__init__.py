"""Image classification: DeepOBS's networks, data on the device with its augmentation, and many networks trained at once."""
