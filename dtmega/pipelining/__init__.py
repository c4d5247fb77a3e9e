"""Pipeline parallelism: cut the whole meta model into stages, run them by a schedule, keep shared parameters equal."""
