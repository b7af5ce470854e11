"""The paper, checked: every table and figure as a result with claims, a recipe that runs it, and a verdict.

`labels.toml` lists the paper's labels, `results/` says what the paper claims and reports, `recipes/` computes.
"""
