"""Pipeline parallelism: cut a meta model into stages, run the stages on a schedule, keep shared parameters equal."""
