"""Names of our families' weights and keys in directories of transformers, one file per family.

`dtmega/families.py` joins them with the models; `dtmega/formats/` says what the rules mean.
"""
