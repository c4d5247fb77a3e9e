"""Names that our families' weights and keys have in transformers directories, one file per family.

`dtmega/families.py` connects these names with the models; `dtmega/formats/` explains the rules.
"""
