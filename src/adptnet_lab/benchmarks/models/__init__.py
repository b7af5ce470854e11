"""`adptnet benchmark`: any model from token ids to logits on fixed suites of tasks, beside rows of known models."""
