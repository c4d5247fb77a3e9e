# What `import transformers` offers, for the type checker: its own file names all of its 2,600 others, and to read them
# took a third of the time in which ours are checked.
from typing import Any

def __getattr__(name: str) -> Any: ...
