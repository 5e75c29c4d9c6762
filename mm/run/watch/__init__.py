"""What watches a run: log, metrics, timers."""
