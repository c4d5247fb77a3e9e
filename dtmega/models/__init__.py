"""One file per model, written as if for a single device. `families/` has a record for each model."""
