"""The samples of models that say what was hidden, as BERT and T5: which words are hidden, and what the rows then are.

    cut.py, cut_samples.py    documents of sentences cut into samples, and an order of these
    ngrams.py                 which words are hidden: n-grams
    pairs.py, masking.py      BERT's: two segments, in their order or swapped; masks
    spans.py, sentinels.py    T5's: the sequences of encoder and decoder, and the marks in them
    merged_spans.py           spans as in the paper and transformers
    separate_spans.py         spans as in Megatron's T5

Each is a pure function of the seed and the number of the sample.
"""
