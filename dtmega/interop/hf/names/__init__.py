"""Names of our families' weights and config keys in transformers directories, with one module per family.

`dtmega/families.py` connects these names with the models; `dtmega/formats/` explains the rules.
"""
