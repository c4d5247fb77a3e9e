"""Training objectives: their samples, the tensors made from the samples, and the sums that make up the loss.

objective.py                                  what an objective is
known.py, keys.py                             an objective by name; the keys of [data] that each one reads
next_token.py, prefixes.py, conversations.py  causal models
denoising/                                    BERT and T5
routed.py                                     the sums that mixtures of experts add
rows.py, stored_rows.py                       the tensors of a batch; rows of tokens in an object store
sums.py                                       the numbers that a step reports
"""
