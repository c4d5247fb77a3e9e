"""Files and experiment trackers that record a run: the numbers of its steps, and the log of each rank.

    lines.py      opens, trims and writes files with one JSON object per line, such as metrics.jsonl
    loads.py      writes the expert loads to expert_loads.jsonl, in a run with experts
    rank_log.py   writes each rank's log, logs/rank-00000.txt, if `[log] ranks` asks for it
    trackers.py   sends numbers to the experiment trackers that `[log] trackers` names: wandb, mlflow and trackio

`training/metrics.py` uses all of them except `rank_log.py`.
"""
