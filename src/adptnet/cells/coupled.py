"""The coupled cell: an ADPT state and a slow linear memory that feeds back into it (eq:coupled_ADPTNet)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._typing import Device, DType, Positions, Vector
from ..ops._backends import Backend, note_run
from ..recurrence.spectra import BlockDiagonal
from ..solvers.transitions import CoupledTransition, Transition
from . import fused
from .adpt import ADPTCell
from .base import Cell
from .dispatch import Recurrence, choose_scan, run_scan
from .spec import ADPTSpec

__all__ = ["CoupledCell", "Memory"]


class Memory(NamedTuple):
    """The evaluated parameters of a slow memory: fast += gain (feedback ⊙ slow), slow ← decay slow + charge ⊙ fast."""

    gain: BlockDiagonal
    feedback: Tensor
    decay: BlockDiagonal
    charge: Tensor


class CoupledCell(Cell):
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

    def step(self, state: Vector, drive: Tensor) -> Vector:
        return self.stepper()(state, drive)

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        return self.make_step(lambda fast: fast, lambda fast: fast)

    def make_step(
        self, carry: Callable[[Tensor], Tensor], follow: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a step function in which x may be replaced in two places, as a spiking cell does.

        Args:
            carry: M is applied to `carry(x)` in place of x.
            follow: The memory follows `follow(x)` in place of x.
        """
        size = self.spec.size
        bound = self.fast.bind()
        gain, feedback, decay, charge = self.evaluate_memory()

        def step(state: Tensor, drive: Tensor) -> Tensor:
            fast, slow = state.split(size, -1)
            fed = drive[..., :size] + gain.mv(feedback * slow)
            fast = bound.step(fast, torch.cat((fed, drive[..., size:]), -1), carry(fast))
            return torch.cat((fast, decay.mv(slow) + charge * follow(fast)), -1)

        return step

    def scan(
        self,
        drive: Tensor,
        state: Tensor,
        *,
        reset: Tensor | None = None,
        lengths: Tensor | None = None,
        lean: bool = False,
    ) -> Tensor | None:
        recurrence = self.recurrence
        backend = choose_scan(recurrence, drive.dtype, drive.device)
        note_run("forward", backend)
        if not backend.is_kernel:
            return None
        form = recurrence.form
        constants = self.fast.make_constants(form)
        gain, feedback, decay, charge = self.evaluate_memory()
        constants = fused.add_memory(constants, gain, feedback, decay.real, charge)
        factors = fused.make_factors(self.fast.directions, form, drive.dtype)
        return run_scan(constants, form, drive, state, reset=reset, lengths=lengths, lean=lean, factors=factors)

    def choose_scan(self, device: torch.device | str) -> Backend:
        return choose_scan(self.recurrence, self.dtype, torch.device(device), list(self.parameters()))

    @property
    def recurrence(self) -> Recurrence:
        """The recurrence, for the choice of a kernel."""
        fast = self.fast.recurrence
        return fast._replace(owners=((self, CoupledCell), *fast.owners))

    def evaluate_memory(self) -> Memory:
        """Evaluate the parameters of the slow memory."""
        decay: BlockDiagonal = self.slow()
        charge = -torch.expm1(self.slow.log_modulus())
        return Memory(self.fast.drive.gain(self.fast.spectrum), self.feedback.to(charge.dtype), decay, charge)

    def reference_step(self, state: Vector, drive: Tensor) -> Vector:
        """Return the next state computed from its definition with dense matrices: the slow reference for `step`.

        Args:
            state: (..., state_size).
            drive: (..., features).
        """
        size = self.spec.size
        fast, slow = state.split(size, -1)
        gain, decay = self.fast.drive.gain(self.fast.spectrum).dense(), self.slow().dense()
        fed = drive[..., :size] + (self.feedback * slow) @ gain.mT
        fast = self.fast.reference_step(fast, torch.cat((fed, drive[..., size:]), -1))
        return torch.cat((fast, slow @ decay.mT + fast - fast @ decay.mT), -1)

    def linear_transition(self, drive: Tensor) -> Transition:
        """Return [[Λ̄, γ g], [(1 - Γ)Λ̄, Γ + (1 - Γ) γ g]] for each state dimension or pair, with g the feedback."""
        return self._transition(self.fast.spectrum())

    def forward_transition(self, state: Vector, drive: Tensor) -> Transition:
        """Return the matrices of `linear_transition` with the (block) diagonal of M in place of Λ̄."""
        fast, slow = state.split(self.spec.size, -1)
        gain = self.fast.drive.gain(self.fast.spectrum)
        fed = drive[..., : self.spec.size] + gain.mv(self.feedback.to(state.dtype) * slow)
        conjugate = self.fast.conjugate(fast, torch.cat((fed, drive[..., self.spec.size :]), -1))
        return self._transition(conjugate.blocks())

    def _transition(self, fast: BlockDiagonal) -> Transition:
        slow, charge = self.slow(), -torch.expm1(self.slow.log_modulus())
        gain = self.fast.drive.gain(self.fast.spectrum)
        paired = any(blocks.imag is not None for blocks in (fast, slow, gain))
        kept, held, charged, fed, scale = (
            _matrices(blocks, paired)
            for blocks in (fast, slow, BlockDiagonal(charge), gain, BlockDiagonal(self.feedback.to(charge.dtype)))
        )
        fed = fed @ scale
        above = torch.cat((kept, fed.expand_as(kept)), -1)
        below = torch.cat((charged @ kept, (held + charged @ fed).expand_as(kept)), -1)
        matrices = torch.cat((above, below), -2)
        return CoupledTransition(matrices if matrices.dim() > 3 else matrices[None, None])

    def output(self, state: Tensor) -> Tensor:
        return state[..., : self.spec.size]

    def slow_state(self, state: Tensor) -> Tensor:
        """Return w.

        Args:
            state: (..., state_size).
        """
        return state[..., self.spec.size :]


def _matrices(blocks: BlockDiagonal, paired: bool) -> Tensor:
    """Return each eigenvalue as a 1-by-1 matrix, or each pair as a 2-by-2 matrix: (*b, blocks, m, m)."""
    if not paired:
        return blocks.real[..., None, None]
    real = blocks.real.unflatten(-1, (-1, 2))
    imag = torch.zeros_like(real) if blocks.imag is None else blocks.imag.unflatten(-1, (-1, 2))
    first = torch.stack((real[..., 0], -imag[..., 0]), -1)
    second = torch.stack((imag[..., 1], real[..., 1]), -1)
    return torch.stack((first, second), -2)
