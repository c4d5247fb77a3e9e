"""The numbers of a run's steps, as a run writes them down.

    lines.py      files with one JSON object per line, each with its step: opened, cut when a run resumes, written
    loads.py      expert_loads.jsonl, the loads of a mixture's experts
    trackers.py   the experiment trackers wandb, mlflow and trackio

`metrics.py` beside this folder uses all three.
"""
