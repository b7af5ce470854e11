"""The ADPT recurrence x_t = Q(x) Λ̄ Q(x)ᵀ x + drive, one module for each of its components.

spectra       Λ̄: the eigenvalues, and so the timescales
directions    the key and value that span the plane of rotation, computed from the state or the input
projections   the linear maps K, V, B and the read-out
retractions   from key and value to the rotation Q: exponential or Cayley
conjugates    how Q Λ̄ Qᵀ acts on the state, without forming the matrix
drive         how the input enters the state: gain, gate, rotary positions
beta          β, the strength of the non-linearity
step          the model: a step, its operator M and its Jacobian, as pure functions of the evaluated parameters
jacobian      the Jacobian of a step in closed form
"""

from . import beta, conjugates, directions, drive, projections, retractions, spectra, step

__all__ = ["beta", "conjugates", "directions", "drive", "projections", "retractions", "spectra", "step"]
