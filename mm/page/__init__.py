"""The page of a run: one HTML file with its curves, tables and answers, made from the files in ``--log-dir``."""
