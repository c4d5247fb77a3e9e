"""A directory of `transformers`, as someone else may have made it.

    files.py         the tensors of its safetensors: the one reader of the project
    config_json.py   its config.json, and the configuration of transformers that it makes

Nothing in it is run, nothing outside of it is opened, and what cannot be read is one message.
"""
