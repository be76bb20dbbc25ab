"""P3O in other trainers, one module each; every module imports its framework, this package imports none."""
