"""The samples of models that predict hidden words, such as BERT and T5.

    cut.py, cut_samples.py    the cutting of documents into samples, and the shuffling of the samples
    ngrams.py                 the choice of hidden words, as n-grams
    pairs.py, masking.py      BERT: pairs of segments, in order or swapped, and their masks
    spans.py, sentinels.py    T5: the sequences of encoder and decoder, and the special ids in them
    merged_spans.py           T5's hidden spans as in the paper and in transformers
    separate_spans.py         T5's hidden spans as in Megatron

A sample is a pure function of the seed and its number.
"""
