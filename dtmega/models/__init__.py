"""One file per model, written as if for a single device. The records in `dtmega/families/` name them."""
