"""Read launch scripts of bash without running them.

grammar.py parses a text with tree-sitter's grammar of bash, run.py follows its statements, expand.py its words.
Everything that only a machine could tell (the environment, other programs, files) stays unknown, and a word says which
unknown piece it contains.
"""
