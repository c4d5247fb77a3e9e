"""Pipeline parallelism: cut a meta model into stages, run the stages in a schedule, and keep tied parameters equal."""
