"""Which CPUs a container gets: topology hints, pool sizes, the choice of CPUs. Pure functions over frozen values."""
