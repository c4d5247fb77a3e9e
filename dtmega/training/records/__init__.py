"""Files and experiment trackers that record the numbers of a run's steps.

    lines.py      opens, trims and writes files with one JSON object per line, such as metrics.jsonl
    loads.py      writes the expert loads to expert_loads.jsonl
    trackers.py   sends numbers to the experiment trackers wandb, mlflow and trackio

`training/metrics.py` uses all three modules.
"""
