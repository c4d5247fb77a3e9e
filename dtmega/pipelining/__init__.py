"""Pipeline parallelism: cut the whole meta model into stages, run them in a schedule, keep one what several hold."""
