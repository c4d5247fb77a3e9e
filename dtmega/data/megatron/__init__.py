"""Reproduce the sample order of a Megatron run (`[data] order`), so that dtmega can continue the run.

order.py    the samples of each split; start reading here
index.py    the three indices of one corpus, equal to Megatron's
blend.py    the corpus that each sample of a blend comes from
cache.py    search for the indices that Megatron has cached next to its data
"""
