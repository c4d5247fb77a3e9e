"""Pipeline parallelism: cut the whole meta model into stages, run them in a schedule, keep a tied weight one."""
