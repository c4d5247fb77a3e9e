"""Files, locks, terminals and child processes: tools for any Python program, unrelated to training."""
