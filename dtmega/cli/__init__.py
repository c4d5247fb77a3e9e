"""The command line: the entry of a program, the commands of `dtmega`, and what `convert` does."""
