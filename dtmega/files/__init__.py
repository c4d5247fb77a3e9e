"""Files, locks, terminals and child processes: what any Python program needs, nothing about training."""
