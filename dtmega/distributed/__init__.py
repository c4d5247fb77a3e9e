"""Processes of one job: how they meet, start together, watch over each other and end.

`dtmega/mesh.py` makes their groups.
"""
