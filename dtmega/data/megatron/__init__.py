"""Samples in the order that Megatron would read them in, to continue one of its runs: `[data] order`.

order.py    the samples of each split of a run; start here
index.py    the three indices of one corpus, equal to Megatron's
blend.py    the corpus that each sample of a blend comes from
cache.py    indices that Megatron has cached next to its data
"""
