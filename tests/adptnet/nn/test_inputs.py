"""Invalid input: errors say what was given, what is needed and what to type."""

import pytest
import torch

from adptnet import ADPTNet, ADPTState, Bidirectional, SequenceModel, adjoints, cells, solvers, verify
from adptnet.errors import IncompatibleError, InputError, NonFiniteError

WIDTH = 6


@pytest.fixture
def layer():
    return ADPTNet.paper(WIDTH, beta=1.0)


def with_nan(*shape):
    x = torch.randn(*shape)
    x[..., 3, 2] = torch.nan
    return x


def row(*bounds):
    return {"cu_seqlens": torch.tensor(bounds)}


BAD_CALLS = {
    "wrong width": (
        lambda f: f(torch.randn(2, 5, 7)),
        "got shape (2, 5, 7). Build the layer with width=7, or put nn.Linear(7, 6) before it.",
    ),
    "four dimensions": (lambda f: f(torch.randn(2, 2, 5, 6)), "(batch, time, 6), or (time, 6) for one sequence"),
    "a step for a sequence": (lambda f: f(torch.randn(6)), "got shape (6,). x must have 2 or 3 dimensions."),
    "one number": (lambda f: f(torch.tensor(1.0)), "got shape (). x must have 2 or 3 dimensions."),
    "a list": (lambda f: f([[1.0, 2.0]]), "x must be a tensor; got list. Pass torch.as_tensor(x)."),
    "a list for a solve": (lambda f: f.solve([[1.0, 2.0]]), "x must be a tensor; got list"),
    "a list for a model": (lambda f: SequenceModel(f.spec, vocabulary=5)([[1, 2]]), "x must be a tensor; got list"),
    "a sequence for a step": (lambda f: f.step(torch.randn(2, 5, 6)), "step takes one time step"),
    "integers": (lambda f: f(torch.ones(2, 5, 6, dtype=torch.int64)), "Pass inputs.float()"),
    "too many digits": (lambda f: f.float()(torch.randn(2, 5, 6)), "inputs are torch.float64 but the cell computes in"),
    "state of another dtype": (
        lambda f: f(torch.randn(2, 5, 6), f.initial_state(2, dtype=torch.float32)),
        "the state is torch.float32 but the cell computes in torch.float64. Pass state.to(torch.float64)",
    ),
    "state of another batch": (
        lambda f: f(torch.randn(2, 5, 6), f.initial_state(3)),
        "Make one with initial_state(2)",
    ),
    "state of a list": (lambda f: f(torch.randn(2, 5, 6), [0.0] * 6), "the state is a list"),
    "length zero": (
        lambda f: f(torch.randn(2, 5, 6), lengths=torch.tensor([5, 0])),
        "lengths[1] = 0; a length must be between 1",
    ),
    "length too long": (lambda f: f(torch.randn(2, 5, 6), lengths=torch.tensor([6, 2])), "and the padded length 5"),
    "fractional lengths": (lambda f: f(torch.randn(2, 5, 6), lengths=torch.tensor([5.0, 2.0])), "Pass lengths.long()"),
    "too few lengths": (lambda f: f(torch.randn(2, 5, 6), lengths=torch.tensor([5])), "2 sequences need (2,)"),
    "reset that is not bool": (lambda f: f(torch.randn(2, 5, 6), reset=torch.zeros(2, 5)), "Pass reset.bool()"),
    "reset of another shape": (
        lambda f: f(torch.randn(2, 5, 6), reset=torch.zeros(2, 4, dtype=torch.bool)),
        "torch.bool of shape (2, 5)",
    ),
    "empty segment": (lambda f: f(torch.randn(1, 5, 6), **row(0, 3, 3, 5)), "sequence 1 runs from 3 to 3"),
    "backward segment": (lambda f: f(torch.randn(1, 5, 6), **row(0, 4, 2, 5)), "sequence 1 runs from 4 to 2"),
    "segments that end early": (lambda f: f(torch.randn(1, 5, 6), **row(0, 4)), "from 0 to the total length, 5"),
    "segments of a batch": (lambda f: f(torch.randn(2, 5, 6), **row(0, 5)), "x is one row of sequences"),
    "segments and lengths": (
        lambda f: f(torch.randn(1, 5, 6), lengths=torch.tensor([5]), **row(0, 5)),
        "cu_seqlens already defines where sequences begin and end. Drop lengths=",
    ),
    "a guess for a sequential solve": (lambda f: f.solve(torch.randn(1, 5, 6), guess=torch.zeros(1)), "Drop guess="),
    "input of another width to a solver": (
        lambda f: solvers.Sequential()(f.cell, torch.randn(2, 5, 3)),
        "inputs have 3 features (shape (2, 5, 3)), but ADPTCell takes 6",
    ),
    "a vector to a solver": (lambda f: solvers.Sequential()(f.cell, torch.randn(6)), "(batch, time, features)"),
    "segments of no step": (lambda f: adjoints.Checkpointed(0), "must be an integer >= 1"),
}


@pytest.mark.parametrize("case", BAD_CALLS, ids=str)
def test_a_bad_call_gets_a_clear_error(layer, case):
    call, message = BAD_CALLS[case]
    with pytest.raises(InputError) as error:
        call(layer)
    assert message in str(error.value)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_check_and_solve_reject_non_finite_input(layer, bad):
    x = torch.randn(2, 5, WIDTH)
    x[1, 3, 2] = bad
    for call in (layer.check, layer.solve):
        with pytest.raises(NonFiniteError, match="first at sequence 1, step 3; 1 of 10 steps"):
            call(x)
    with pytest.raises(NonFiniteError, match="first at step 3"):
        layer.check(x[1])
    layer.check(x[:1])
    assert layer.solve(x, lengths=torch.tensor([5, 3])).result is solvers.Result.CONVERGED
    assert layer.solve(x[1], lengths=torch.tensor(3)).result is solvers.Result.CONVERGED


def test_check_rejects_what_forward_rejects(layer):
    for x in (torch.randn(2, 5, 7), torch.ones(2, 5, 6, dtype=torch.int64)):
        with pytest.raises(InputError):
            layer.check(x)


def test_forward_propagates_nan_within_its_sequence_only(layer):
    x = with_nan(2, 5, WIDTH)
    x[1] = 0.0
    y, _ = layer(x)
    assert y[0, :3].isfinite().all()
    assert y[0, 3:].isnan().any()
    assert not y[1].any()


def test_plain_tuples_and_lists_are_accepted(layer):
    x = torch.randn(2, 5, WIDTH)
    _, state = layer(x)
    assert torch.equal(layer(x, tuple(state))[0], layer(x, state)[0])
    assert torch.equal(layer(x, lengths=[5, 2])[0], layer(x, lengths=torch.tensor([5, 2]))[0])
    reset = torch.tensor([[False, False, True, False, False]])
    assert torch.equal(layer(x[0], reset=reset)[0], layer(x[0], reset=reset[0])[0])
    assert not torch.equal(layer(x[0], reset=reset)[0], layer(x[0])[0])


def test_a_model_rejects_wrong_input_with_the_right_shape():
    tokens = SequenceModel(ADPTNet.paper(4).spec, vocabulary=5)
    vectors = SequenceModel(ADPTNet.paper(4).spec, input_size=3, output_size=2, head="last")
    with pytest.raises(InputError, match=r"takes \(batch, time\) tokens, int64; got torch\.float64"):
        tokens(torch.randn(2, 3))
    with pytest.raises(InputError, match="takes \\(batch, time, 3\\)"):
        vectors(torch.randn(2, 5, 4))
    with pytest.raises(InputError, match="generate needs a model from tokens"):
        vectors.generate(torch.zeros(1, 1, dtype=torch.int64), 3)
    with pytest.raises(InputError, match="at least one token"):
        tokens.generate(torch.zeros(1, 0, dtype=torch.int64), 3)
    with pytest.raises(InputError, match="temperature must be >= 0"):
        tokens.generate(torch.zeros(1, 1, dtype=torch.int64), 3, temperature=-1.0)


def test_missing_steps_and_references_are_reported():
    both = Bidirectional(ADPTNet.paper(4).spec)
    with pytest.raises(InputError, match="needs the whole sequence"):
        both.step(torch.randn(2, 4))
    with pytest.raises(InputError, match="takes \\(batch, time, 4\\)"):
        both(torch.randn(5, 4))
    with pytest.raises(IncompatibleError, match="verify compares an ADPTNet"):
        verify(torch.nn.Linear(3, 3), torch.randn(1, 2, 3))
    with pytest.raises(IncompatibleError, match=r"such as nn\.GRUCell or nn\.GRU; got function"):
        cells.from_torch(lambda x, h: h)


def test_a_state_can_be_passed_by_name_and_taken_apart(layer):
    state = layer.initial_state(3)
    assert isinstance(state, ADPTState)
    assert state.state.shape == (3, WIDTH)
    assert state.position.dtype == torch.int64
