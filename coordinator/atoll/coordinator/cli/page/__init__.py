"""A page about a running run, and numbers for Prometheus: a view like those of the command line, for browsers."""
