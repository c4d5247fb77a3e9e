"""Reads and writes `transformers` directories: config.json, safetensors, tokenizer.

    tensors.py       reads safetensors; no other module does
    write.py         writes safetensors and their index; no other module does
    config_json.py   reads config.json, and makes a transformers config
    folder.py        presents a directory's weights under a model's parameter names
    ours.py          reads weights for one of dtmega's own models, by the rules of the model's format
    theirs.py        reads and converts weights of a transformers model, with transformers' own conversions
    record.py        what files ask of a model of transformers (`interop/stored.py`)
    export.py        writes a directory that `from_pretrained` loads

Code in a directory is never run, and no file outside the directory is opened. A file that cannot be read raises a
ValueError.
"""
