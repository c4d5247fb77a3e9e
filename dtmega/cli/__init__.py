"""The command line: program entry points, the commands of `dtmega`, and the code behind convert, inspect and replay."""
