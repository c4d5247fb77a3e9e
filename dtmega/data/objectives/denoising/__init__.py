"""Objectives of models that predict hidden words, such as BERT and T5, and their samples.

    masked.py                 BERT's objective
    span_objectives.py        T5's objectives
    cut.py, cut_samples.py    cut documents into samples and shuffle the samples
    ngrams.py                 choose the words to hide, as n-grams
    pairs.py, masking.py      BERT: pairs of segments, in order or swapped, and their masks
    spans.py, sentinels.py    T5: encoder and decoder sequences, and their special ids
    merged_spans.py           T5's hidden spans as in the paper and in transformers
    separate_spans.py         T5's hidden spans as in Megatron

A sample is a pure function of the seed and the sample's number.
"""
