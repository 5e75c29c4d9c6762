"""The command ``mm-plan``, and the report of ``--dry-run``: finds layouts and lists, times a device, predicts steps."""
