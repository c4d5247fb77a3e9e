"""Read bash launch scripts without running them.

grammar.py parses a script with tree-sitter's bash grammar, run.py follows the statements, and expand.py expands the
words. Anything that depends on a real machine (environment, other programs, files) stays unknown. A word is a sequence
of pieces, and each piece is known or unknown text.
"""
