"""A directory of `transformers`, as someone else may have made it, and as we make it.

    tensors.py       the tensors of its safetensors: the one reader of the project
    write.py         files of safetensors, and their index: the one writer
    config_json.py   its config.json, and the configuration of transformers that it makes: the one opener
    folder.py        its weights by the names of a model
    ours.py          those of a model that is written here: by the rules of its format, in both directions
    theirs.py        those of a model of transformers: by its own conversions, in both directions
    export.py        a directory as `from_pretrained` loads it: the one exporter

Nothing in it is run, nothing outside of it is opened, and what cannot be read is one message.
"""
