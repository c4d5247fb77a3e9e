"""Count what one rank does: its real step on a pretended device, watched operator by operator (`role.py`)."""
