"""Names and forms of a family's weights in other people's files, as data: a `Format` for each program.

    rules.py      which of their tensors ours are made of, and how
    sources.py    named tensors under other names, read by slice, in both directions
    format.py     rules and the configuration that stands beside the weights: one record

Nothing here opens a file: `hf/files/` reads and writes them.
"""
