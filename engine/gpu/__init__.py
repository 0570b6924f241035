"""The executor on a GPU: what lies on the device, and what is launched there."""
