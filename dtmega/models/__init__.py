"""One plain single-device file per model. `dtmega/families.py` finds it by name."""
