"""Saved states of a run: complete or not there, and never unpickled."""
