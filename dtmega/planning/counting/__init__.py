"""Count the work of one rank: run the rank's real step on a fake device and watch every operator (`role.py`)."""
