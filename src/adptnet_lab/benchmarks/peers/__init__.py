"""Other libraries compared with the solvers of adptnet, one script each, which needs the library installed."""
