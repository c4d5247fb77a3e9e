"""The form in which other programs store a family's weights, written as data: one `Format` per program and family.

    rules.py      the rows of which of their tensors make up each of our tensors
    sources.py    named tensors, read by slice, and the same tensors renamed, cast or assembled
    format.py     `Format`: the rules of one program, and the keys of the configuration stored beside the weights
    whole.py      applies a `Format` to all tensors of a model, in both directions

"Ours" are dtmega's tensors and keys, "theirs" those of the other program. Nothing here opens a file: `hf/files/` and
`megatron/` do.
"""
