"""The loads of a mixture's experts over the steps, in the report about a run.

columns.py   expert_loads.jsonl, read into at most 100 columns of steps
plot.py      the heat map, drawn by plotly
section.py   the section of the page: how to read the map, and the experts that no token uses
"""
