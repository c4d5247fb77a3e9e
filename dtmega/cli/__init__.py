"""The command line: program entry points, the commands of `dtmega`, and the code behind `convert` and `inspect`."""
