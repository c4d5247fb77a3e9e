"""Tools for files, locks, terminals and child processes. Nothing in this package is specific to training."""
