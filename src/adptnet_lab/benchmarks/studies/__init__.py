"""Longer studies, each a program: `python -m adptnet_lab.benchmarks.studies.learning`."""
