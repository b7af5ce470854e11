"""Regression tests: shared memory, threads, padding, training modes, half precision."""

import threading

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence
from torch.testing import assert_close

import adptnet
from adptnet import ADPTNet, ADPTState, Bidirectional, SequenceModel, Stack, cells, nn, projections, solvers, verify
from adptnet.errors import IncompatibleError, InputError


def test_outputs_and_state_do_not_share_memory():
    layer = ADPTNet.paper(4, beta=1.0)
    x = torch.randn(3, 5, 4)
    with torch.no_grad():
        y, state = layer.step(x[:, 0])
        before = state.state.clone()
        y.zero_()
        assert torch.equal(state.state, before)
        y, state = layer(x)
        last = y[:, -1].clone()
        state.state.zero_()
        assert torch.equal(y[:, -1], last)
        start = layer.initial_state(3)
        _, same = layer(x[:, :0], start)
        same.state.add_(1)
        assert not start.state.any()


def test_a_layer_in_another_thread_changes_nothing_here():
    """If threads shared a cache of parametrized weights, a layer would use stale weights."""
    busy = ADPTNet.paper(4, projection=projections.Orthogonal())
    ours = ADPTNet.paper(4, beta=1.0, projection=projections.Orthogonal())
    x = torch.randn(1, 5, 4)
    started, stop = threading.Event(), threading.Event()

    @torch.no_grad()
    def serve():
        started.set()
        while not stop.is_set():
            busy(torch.randn(1, 50, 4))
            ours(x)

    thread = threading.Thread(target=serve)
    thread.start()
    started.wait()
    try:
        for _ in range(20):
            parameters = list(ours.parameters())
            gradients = torch.autograd.grad(ours(x)[0].sum(), parameters)
            assert all(g.isfinite().all() for g in gradients)
            before = ours(x)[0].detach()
            with torch.no_grad():
                for parameter in ours.cell.directions.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            assert not torch.equal(ours(x)[0], before)
    finally:
        stop.set()
        thread.join()


def test_a_step_past_the_end_makes_no_nan():
    """One step is undefined at zero input, the other overflows if it is run past the end."""
    weight = torch.ones(4, requires_grad=True)
    unit = cells.from_function(lambda s, u: 0.5 * s + weight * u / u.norm(dim=-1, keepdim=True), 4)
    growing = cells.from_function(lambda s, u: 1e100 * s + weight * u, 4)
    for cell in (unit, growing):
        solution = solvers.Sequential()(cell, torch.randn(3, 8, 4), lengths=torch.tensor([3, 2, 1]))
        assert solution.result is solvers.Result.CONVERGED
        (gradient,) = torch.autograd.grad(solution.states.sum(), weight)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("head", ["token", "last", "mean"])
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_padding_does_not_affect_a_model(head, norm):
    model = SequenceModel(ADPTNet.paper(6).spec, input_size=4, output_size=3, head=head, norm=norm, depth=2)
    x = torch.randn(2, 5, 4)
    padded = x.clone()
    padded[1, 3:] = torch.nan
    lengths = torch.tensor([5, 3])
    logits, _ = model(padded, lengths=lengths)
    gradients = torch.autograd.grad(logits.sum(), list(model.parameters()), allow_unused=True)
    assert logits.isfinite().all()
    assert all(g is None or g.isfinite().all() for g in gradients)
    block = nn.BlockSpec(ADPTNet.paper(4).spec).build()
    assert not block(padded, lengths=[5, 3])[0][1, 3:].any()


def test_resets_in_the_padding_have_no_effect():
    x, lengths = torch.randn(2, 5, 4), torch.tensor([5, 3])
    reset = torch.zeros(2, 5, dtype=torch.bool)
    noisy = reset.clone()
    noisy[1, 3:] = True
    for layer in (ADPTNet.paper(4, beta=1.0), Bidirectional(ADPTNet.paper(4, beta=1.0).spec)):
        _, state = layer(x)
        found, expected = (layer(x, state, lengths=lengths, reset=r) for r in (noisy, reset))
        assert_close(found[0], expected[0])
        assert_close(found[1], expected[1])


def test_packed_rows_are_rejected_where_they_are_ambiguous():
    both = Bidirectional(ADPTNet.paper(4).spec)
    row, bounds = torch.randn(1, 8, 4), torch.tensor([0, 5, 8])
    with pytest.raises(InputError, match="Pass lengths= instead of cu_seqlens="):
        both(row, cu_seqlens=bounds)
    with pytest.raises(InputError, match="one output per sequence"):
        SequenceModel(ADPTNet.paper(4).spec, input_size=4, output_size=2, head="mean")(row, cu_seqlens=bounds)
    packed = pack_padded_sequence(torch.randn(2, 5, 4), [5, 3], batch_first=True)
    block, stack = nn.BlockSpec(ADPTNet.paper(4).spec).build(), Stack(ADPTNet.paper(4).spec, 2)
    for call in (both, block, stack, ADPTNet.paper(4).solve, ADPTNet.paper(4).check):
        with pytest.raises(InputError, match="Unpack it"):
            call(packed)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_verify_is_strict_in_every_dtype_and_layout(batch_first, dtype):
    layer = ADPTNet.paper(6, beta=1.0, dtype=dtype, batch_first=batch_first)
    x = torch.randn(7, 3, 6).to(dtype)
    with torch.no_grad():
        assert verify(layer, x).ok
        layer.cell.stepper = lambda: lambda state, drive: 0.9 * state + drive
        assert not verify(layer, x).ok


def test_a_frozen_norm_stays_frozen_after_generation():
    model = SequenceModel(ADPTNet.paper(4).spec, vocabulary=2, norm="batch").train()
    model.norm.eval()
    model.generate(torch.zeros(1, 1, dtype=torch.int64), 2)
    assert model.training
    assert not model.norm.norm.training


def test_half_precision_is_right_or_rejected():
    layer = ADPTNet.paper(4, projection=projections.Orthogonal(), dtype=torch.bfloat16)
    x = torch.randn(2, 5, 4, dtype=torch.bfloat16)
    assert layer(x)[0].dtype == torch.bfloat16
    k = layer.cell.directions[0].key_projection.dense()
    assert_close(k @ k.mT, torch.eye(4, dtype=k.dtype), atol=1e-6, rtol=0)
    with pytest.raises(IncompatibleError, match=r"Call \.float\(\)"):
        solvers.Sequential()(cells.from_torch(torch.nn.GRUCell(4, 4, dtype=torch.bfloat16)), x)
    both = Bidirectional(ADPTNet.paper(4, dtype=torch.float32).spec).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert both(x.float())[0].dtype == torch.float32


def test_a_step_that_changes_the_shape_of_its_state_is_rejected():
    x = torch.randn(3, 5, 3)
    for step in (lambda s, u: s.mean(0, keepdim=True), lambda s, u: s[..., :2], lambda s, u: (s + u).float()):
        with pytest.raises(InputError, match="It must keep both"):
            solvers.Sequential()(cells.from_function(step, 3), x)
    with pytest.raises(IncompatibleError, match="from_torch"):
        cells.from_function(torch.nn.GRUCell(3, 3), 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, x: f(x, (torch.zeros(3, 4), torch.zeros(3, 4))), "the state is a tuple; ADPTCell takes a tensor"),
        (lambda f, x: f(x, ADPTState(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))), "3 sequences need int64"),
        (lambda f, x: f(x, solver=3), "must be a solver object"),
        (lambda f, x: f(x, solver=solvers.Sequential), "must be a solver object. Pass solver=solvers.Sequential()."),
        (lambda f, x: f(x, solver=solvers.DEER), "must be a solver object. Pass solver=solvers.DEER()."),
        (lambda f, x: f(x, solver=lambda: None), "must be a solver object. Pass solver=solvers.Sequential()."),
        (lambda f, x: Stack(f.spec, 2)(x, (None,)), "the tuple of 2 states an earlier call returned; got tuple of 1"),
        (lambda f, x: adptnet.adjoints.Checkpointed(2.5), "must be an integer"),
    ],
)
def test_more_bad_calls_get_a_clear_error(call, message):
    with pytest.raises(InputError) as error:
        call(ADPTNet.paper(4), torch.randn(3, 5, 4))
    assert message in str(error.value)


def test_lengths_of_any_integer_type_and_resets_of_any_kind_are_accepted():
    layer = ADPTNet.paper(4)
    x = torch.randn(1, 300, 4)
    expected = layer(x, lengths=torch.tensor([200]))[0]
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(layer(x, lengths=torch.tensor([200], dtype=dtype))[0], expected)
    reset = torch.rand(1, 300) < 0.1
    assert torch.equal(layer(x, reset=reset.numpy())[0], layer(x, reset=reset)[0])
    assert torch.equal(layer(x, reset=reset.tolist())[0], layer(x, reset=reset)[0])


def test_tiny_states_have_finite_jacobians():
    cell = ADPTNet.paper(4, beta=4.0, dtype=torch.float32).cell
    for scale in (1e-30, 1e-34, 1e-38, 1e-42, 0.0):
        state = scale * torch.randn(3, 4, dtype=torch.float32)
        assert cell.jacobian(state, torch.zeros(3, 4, dtype=torch.float32)).isfinite().all()


def test_sampling_at_extreme_temperatures():
    model = SequenceModel(ADPTNet.paper(4).spec, vocabulary=5)
    prompt = torch.zeros(2, 1, dtype=torch.int64)
    assert torch.equal(model.generate(prompt, 5, temperature=1e-40), model.generate(prompt, 5, temperature=0))
    with pytest.raises(InputError, match="temperature"):
        model.generate(prompt, 5, temperature=float("nan"))
    with pytest.raises(InputError, match="has no step"):
        SequenceModel(ADPTNet.paper(4).spec, input_size=3, output_size=2, head="mean").step(torch.randn(1, 3))


def test_step_compiles_and_exports():
    layer = ADPTNet.paper(4, beta=1.0)
    x, state = torch.randn(3, 4), layer.initial_state(3)

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, state, position):
            y, after = self.layer.step(x, ADPTState(state, position))
            return y, after.state, after.position

    exported = torch.export.export(Step(), (x, *state)).module()
    assert_close(exported(x, *state)[0], layer.step(x, state)[0])


def test_checkpointed_segments_past_the_end_make_no_nan():
    weight = torch.ones(4, requires_grad=True)
    squaring = cells.from_function(lambda s, u: s.square() + weight * u + 2, 4)
    x, lengths = torch.rand(1, 60, 4), torch.tensor([3])
    for adjoint in (adptnet.adjoints.Unrolled(), adptnet.adjoints.Checkpointed(2)):
        solution = solvers.Sequential()(squaring, x, lengths=lengths, adjoint=adjoint)
        (gradient,) = torch.autograd.grad(solution.states.sum(), weight)
        assert gradient.isfinite().all()


def test_a_checkpoint_of_small_factors_of_a_wide_layer_is_read_back(tmp_path):
    narrow = projections.Kronecker((8, 8))
    layer = ADPTNet.paper(64, spectrum=adptnet.spectra.S4DInv(), projection=narrow, input_projection=narrow)
    adptnet.save(layer, tmp_path / "model")
    assert adptnet.load(tmp_path / "model").spec == layer.spec


def test_a_controlled_dot_is_exact_for_equal_projections():
    module = adptnet.directions.FromState(dot=0.5).build(8, projections.Dense())
    module.value_projection = module.key_projection
    key, value = module(torch.randn(20, 8))
    assert ((key * value).sum(-1) - 0.5).abs().max() < 1e-12
    assert (key.norm(dim=-1) < 1 + 1e-12).all()
