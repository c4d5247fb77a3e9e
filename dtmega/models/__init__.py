"""One file per model, written as if for a single device. `dtmega/families.py` lists them by name."""
