"""Predict the time, energy and price of counted work on a fabric (`fabric.py`, `step_time.py`, `budget.py`)."""
