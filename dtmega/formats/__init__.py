"""The form in which other programs store a family's weights, written as data: one `Format` per program and family.

    rules.py      rules between our tensors and theirs, and the row runs that follow from them
    sources.py    named tensors, read by slice, and the same tensors renamed, cast or assembled
    format.py     `Format`: the rules of one program, and the keys of the configuration stored beside the weights
    whole.py      applies a `Format` to all tensors of a model, in both directions

"Ours" are dtmega's tensors and keys, "theirs" the other program's. Nothing here opens a file: interop/ does.
"""
