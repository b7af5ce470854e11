"""Reproduction of the paper: every table and figure as a result with claims, a recipe that runs it, and verdicts.

`labels.toml` lists the paper's labels. `claims/` states what the paper claims and reports. `recipes/` holds one file
per result or family of results, with the settings and the tests of the claims. `settings/` holds networks and training
runs that several recipes share, such as those of the S5 word problem.
"""
