"""The command ``mm-plan``: measures a device, and finds the layout for a model, data and devices."""
