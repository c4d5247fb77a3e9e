"""The storage formats of other programs, described as data: a record of each family, with a `Format` for each program.

    rules.py      rules that relate our tensors to theirs, and lists of the rows to copy by these rules
    sources.py    named tensors, read by slice, and wrappers that rename, cast or assemble tensors
    format.py     `Format`: one program's rules, and the keys of the configuration stored next to the weights
    whole.py      applies a `Format` to all tensors of a model, in both directions
    own.py        `OwnFormats`: the record of a family by its formats (`interop/stored.py`)
    bloom.py ...  the records, with the formats of transformers; `megatron/` has those of Megatron

"Ours" means dtmega's tensors and keys; "theirs" means the other program's tensors and keys.
"""
