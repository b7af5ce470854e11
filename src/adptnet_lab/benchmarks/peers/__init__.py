"""Scripts that compare other libraries with the solvers of adptnet.

Each needs its library installed; `gru_comparison` holds the code they share.
"""
