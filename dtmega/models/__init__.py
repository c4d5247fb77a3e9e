"""One file per model, written as if for a single device. `dtmega/families.py` lists the models by name."""
