"""Count the work of one rank: run the rank's real step on a pretended device and watch every operator (`role.py`)."""
