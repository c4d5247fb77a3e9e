"""The processes of a job: how they meet, start together, watch over each other and exit.

Their process groups are made in `dtmega/mesh.py`.
"""
