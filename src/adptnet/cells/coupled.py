"""The coupled cell: an ADPT state and a slow linear memory that feeds back into it (eq:coupled_ADPTNet)."""

import torch
from torch import Tensor, nn

from .._typing import Device, DType, Positions, Vector
from ..recurrence.conjugates import PhasedConjugate
from ..recurrence.spectra import BlockDiagonal
from ..recurrence.step import Memory, Parameters, conjugate, split_drive
from ..solvers.transitions import CoupledTransition, Transition
from .adpt import ADPTCell
from .dispatch import Recurrence
from .evaluated import EvaluatedCell
from .spec import ADPTSpec
from .structure import Structure

__all__ = ["CoupledCell"]


class CoupledCell(EvaluatedCell):
    """An ADPT cell with state x and a slow memory w, which feeds back into it. The state is x and w, concatenated.

    x_t = M x_{t-1} + γ ⊙ (u_t + feedback ⊙ w_{t-1}),  w_t = Γ w_{t-1} + (1 - Γ) x_t, with the gain γ, the projected
    input u and the eigenvalues Γ of the memory.

    Args:
        spec: All choices of the model; `spec.memory` is not None.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: ADPTSpec, *, device: Device = None, dtype: DType = None):
        super().__init__()
        assert spec.memory is not None
        self.spec = spec
        self.input_size = spec.width
        self.state_size = 2 * spec.size
        self.output_size = spec.size
        self.fast = ADPTCell(spec, device=device, dtype=dtype)
        self.slow = spec.memory.spectrum.build(spec.size, device=device, dtype=dtype)
        start = spec.memory.feedback
        feedback = torch.empty(spec.size, device=device, dtype=dtype)
        self.feedback = nn.Parameter(feedback.uniform_(*start) if isinstance(start, tuple) else feedback.fill_(start))

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        return self.fast.prepare(inputs, position)

    @property
    def recurrence(self) -> Recurrence:
        fast = self.fast.recurrence
        return fast._replace(owners=((self, CoupledCell), *fast.owners))

    def evaluate(self, *, stacked: bool = False) -> Parameters:
        decay: BlockDiagonal = self.slow()
        charge = -torch.expm1(self.slow.log_modulus())
        gain = self.fast.drive.gain(self.fast.spectrum)
        memory = Memory(gain, self.feedback.to(charge.dtype), decay, charge)
        return self.fast.evaluate(stacked=stacked)._replace(memory=memory)

    def _linear_transition(self, drive: Tensor) -> Transition:
        """Return [[Λ̄, γ g], [(1 - Γ)Λ̄, Γ + (1 - Γ) γ g]] for each state dimension or pair, with g the feedback.

        With a phase P, P Λ̄ replaces Λ̄.
        """
        parameters = self.evaluate()
        assert parameters.blocks is not None
        return _make_transition(parameters, parameters.blocks, split_drive(parameters, drive).phase)

    def _forward_transition(self, state: Vector, drive: Tensor) -> Transition:
        """Return the matrices of `_linear_transition` with the (block) diagonal of M in place of Λ̄."""
        parameters = self.evaluate()
        operator = conjugate(parameters, state, drive)
        if isinstance(operator, PhasedConjugate):
            return _make_transition(parameters, operator.inner.blocks(), operator.phase)
        return _make_transition(parameters, operator.blocks(), None)

    def structure(self) -> Structure:
        known = super().structure()
        return known._replace(conjugate=None, eigenvalues=None, radius=None)  # the step is not M x + drive

    def eigenvalues(self) -> None:
        """Return None: the constant part of the step couples x and w."""

    def output(self, state: Tensor) -> Tensor:
        return state[..., : self.spec.size]

    def slow_state(self, state: Tensor) -> Tensor:
        """Return w.

        Args:
            state: (..., state_size).
        """
        return state[..., self.spec.size :]


def _make_transition(parameters: Parameters, fast: BlockDiagonal, phase: BlockDiagonal | None) -> Transition:
    memory = parameters.memory
    assert memory is not None
    assert memory.feedback is not None
    gain, slow = memory.gain, memory.decay
    paired = phase is not None or any(blocks.imag is not None for blocks in (fast, slow, gain))
    kept, held, charged, fed, scale = (
        _matrices(blocks, paired)
        for blocks in (fast, slow, BlockDiagonal(memory.charge), gain, BlockDiagonal(memory.feedback))
    )
    kept = kept if phase is None else phase.pair_matrices() @ kept
    fed = fed @ scale
    above = torch.cat((kept, fed.expand_as(kept)), -1)
    below = torch.cat((charged @ kept, (held + charged @ fed).expand_as(kept)), -1)
    matrices = torch.cat((above, below), -2)
    return CoupledTransition(matrices if matrices.dim() > 3 else matrices[None, None])


def _matrices(blocks: BlockDiagonal, paired: bool) -> Tensor:
    """Return each eigenvalue as a 1-by-1 matrix, or each pair as a 2-by-2 matrix: (*b, blocks, m, m)."""
    if not paired:
        return blocks.real[..., None, None]
    return blocks.pair_matrices()
