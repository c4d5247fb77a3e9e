"""Pipeline parallelism: split a meta model into stages, run them in a schedule, and keep tied parameters equal."""
