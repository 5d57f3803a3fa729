"""Image classification: DeepOBS's networks, data augmentation on the device, and training of many networks at once."""
