"""Operations: each in a package of its own whose `reference.py` is its specification."""
