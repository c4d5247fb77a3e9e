"""Reads and writes directories of `transformers`: config.json, safetensors, tokenizer.

    tensors.py       reads safetensors; the project has no other reader of them
    write.py         writes safetensors and their index; the project has no other writer
    config_json.py   reads config.json, and makes a configuration of transformers from it
    folder.py        the weights of a directory under the names of a model
    ours.py          weights for one of dtmega's own models, by the rules of its format
    theirs.py        weights for or from a model of transformers, by the conversions of transformers
    export.py        writes a directory that `from_pretrained` loads

No code in a directory is run, no file outside of it is opened, and whatever cannot be read is refused with one message.
"""
