"""`verify` for cells: every parallel solver against a sequential loop."""

import pytest
import torch

import adptnet
from adptnet import cells, errors, solvers


class Twisted(torch.nn.Module):
    """A step that mixes the state, with a parameter that no state depends on."""

    def __init__(self, size, features):
        super().__init__()
        self.weight = torch.nn.Parameter(0.5 * torch.randn(size, size))
        self.drive = torch.nn.Parameter(torch.randn(features, size))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, state, inputs):
        return torch.tanh(torch.mm(state, self.weight) + inputs @ self.drive)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_verify_compares_every_solver_of_a_cell_with_a_loop(dtype):
    cell = cells.from_function(Twisted(5, 3).to(dtype), state_size=5, input_size=3)
    x = torch.randn(2, 17, 3, dtype=dtype)
    report = adptnet.verify(cell, x)
    assert report.ok
    compared = {name.partition(":")[0] for name in report.errors}
    assert compared == {"DEER()", "QuasiDEER()", "KoopmanDEER()", "Jacobi()", "Picard()"}
    assert {name.partition(": ")[2] for name in report.errors} == {
        "states", "gradient of x", *(f"gradient of function.{name}" for name in ("weight", "drive", "unused"))
    }  # fmt: skip
    assert str(report).startswith("The solvers agree with a plain loop (tolerance")
    one = adptnet.verify(cell, x, solver=solvers.QuasiDEER())
    assert {name.partition(":")[0] for name in one.errors} == {"QuasiDEER()"}
    with pytest.raises(errors.IncompatibleError):
        adptnet.verify(cell, x, solver=solvers.ConvDEER())


def test_verify_takes_wrapped_cells_layers_and_cells_without_parameters():
    torchs = cells.from_torch(torch.nn.LSTMCell(3, 4))
    assert adptnet.verify(torchs, torch.randn(2, 9, 3)).ok
    assert adptnet.verify(adptnet.Recurrent(torchs, batch_first=False), torch.randn(9, 2, 3)).ok
    assert adptnet.verify(adptnet.Recurrent(cells.ReLURNN(4)), torch.randn(2, 9, 4)).ok
    plain = cells.from_function(lambda state, inputs: torch.sin(state + inputs), state_size=3)
    report = adptnet.verify(plain, torch.randn(2, 9, 3))
    assert report.ok
    assert {name.partition(": ")[2] for name in report.errors} == {"states", "gradient of x"}
    assert adptnet.verify(adptnet.ADPTNet.paper(6, beta=1.0).cell, torch.randn(2, 9, 6)).ok


def test_verify_finds_solvers_that_are_wrong():
    cell = cells.from_torch(torch.nn.GRUCell(3, 4))
    hurried = solvers.QuasiDEER(max_iterations=1, on_failure=solvers.Return())
    report = adptnet.verify(cell, torch.randn(2, 30, 3), solver=hurried)
    assert not report.ok
    assert str(report).startswith("The solvers DIFFER from a plain loop")
    with pytest.raises(errors.InputError, match=r"verify takes \(batch, time, 3\); got shape \(30, 3\)"):
        adptnet.verify(cell, torch.randn(30, 3))


def test_verify_rejects_inputs_that_the_cell_cannot_take():
    cell = cells.from_torch(torch.nn.GRUCell(3, 4))
    for x in (torch.randn(2, 30, 5), torch.randn(2, 0, 3), torch.zeros(2, 5, 3, dtype=torch.complex128)):
        with pytest.raises(errors.InputError):
            adptnet.verify(cell, x)
    assert not adptnet.verify(cell, torch.full((2, 5, 3), torch.nan)).ok
    double = cells.from_torch(torch.nn.GRUCell(3, 4, dtype=torch.float64))
    assert adptnet.verify(double, torch.randn(2, 9, 3, dtype=torch.float32)).ok
