"""The command line: the entry points of programs, the commands of `dtmega`, and the implementation of `convert`."""
