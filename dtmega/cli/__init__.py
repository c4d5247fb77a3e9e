"""The command line: program entry points, the commands of `dtmega`, and the implementation of `convert`."""
