"""Turn counted work into time, energy and money, on a fabric (`fabric.py`, `step_time.py`, `budget.py`)."""
