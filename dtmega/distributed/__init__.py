"""The processes of a job: how they meet, start together, watch over each other and exit.

Process groups are created in `dtmega/mesh.py`.
"""
