"""Experiments with adptnet: the command line, training, tasks, baselines, benchmarks and the paper's reproduction.

The library `adptnet` never imports this package. Its dependencies come with `pip install 'adptnet[lab]'`.
"""
