"""Count the work of one rank: run its real step on a pretended device, and watch every operator (`role.py`)."""
