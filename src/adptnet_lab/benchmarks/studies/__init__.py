"""Longer studies, one program each: `python -m adptnet_lab.benchmarks.studies.learning`."""
