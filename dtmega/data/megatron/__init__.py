"""The samples of a run of Megatron's, in its order, so that the run can be continued here: `[data] order`.

order.py    the splits of a run, and which sample comes when; start here
index.py    the three indices of one corpus, to the integer
blend.py    which corpus of a blend each sample is from
cache.py    indices that the originals have left beside their data
"""
