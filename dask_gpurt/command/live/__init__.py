"""`dask_gpurt.progress`: what moves while a block of a program runs, in notebooks and terminals."""
