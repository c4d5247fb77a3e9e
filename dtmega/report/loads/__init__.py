"""The report's section about the expert loads of a model over the steps.

columns.py   reads expert_loads.jsonl into at most 100 columns of steps
plot.py      draws the heat map with plotly
section.py   writes the section: how to read the map, and which experts no token uses
"""
