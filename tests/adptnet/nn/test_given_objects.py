"""Layers in place of specs, tensors as states, text for common choices, and names of other libraries."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import adptnet as adpt
from adptnet import ADPTNet, Bidirectional, Recurrent, SequenceModel, Stack, cells, projections, solvers
from adptnet.errors import InputError, SpecError
from adptnet.nn import BidirectionalSpec, BlockSpec, GatedSpec, LayerSpec, StackSpec, SwiGLUBlockSpec
from adptnet.nn.block import ResidualBlock

WIDTH = 6
x = torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(0))


def make_trained():
    """Return a layer whose weights differ from those that its spec initializes."""
    torch.manual_seed(1)
    layer = ADPTNet(WIDTH, solver="quasi-deer")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.01)
    return layer


def is_copy(module, layer):
    """Return whether a module has the weights of a layer in tensors of its own."""
    own, its = dict(module.named_parameters()), dict(layer.named_parameters())
    return own.keys() == its.keys() and all(torch.equal(own[n], its[n]) and own[n] is not its[n] for n in its)


# Layers in place of specs


def test_containers_copy_the_weights_of_a_layer_into_every_place():
    layer = make_trained()
    stack, both = Stack(layer, 3), Bidirectional(layer)
    model = SequenceModel(layer, depth=2, vocabulary=5)
    blocks = SequenceModel(BlockSpec(layer).build(), depth=2, vocabulary=5)
    places = [*stack.layers, both.ahead, both.back, *(block.layer for block in model.blocks)]
    assert all(is_copy(place, layer) for place in places)
    assert all(repr(place.solver) == "QuasiDEER()" for place in places)
    assert len({id(p) for place in places for p in place.parameters()}) == 7 * len(list(layer.parameters()))
    assert all(isinstance(block, ResidualBlock) for block in blocks.blocks)
    assert_close(stack(x)[0], layer(layer(layer(x)[0])[0])[0], rtol=0, atol=0)


def test_a_container_of_a_layer_has_the_spec_of_its_spec(tmp_path):
    layer = make_trained()
    assert Stack(layer, 2).spec == StackSpec(layer.spec, 2)
    assert Bidirectional(layer).spec == BidirectionalSpec(layer.spec)
    model = SequenceModel(layer, depth=2, vocabulary=5)
    assert model.spec == SequenceModel(layer.spec, depth=2, vocabulary=5).spec
    for kind in (BlockSpec, SwiGLUBlockSpec, StackSpec, BidirectionalSpec, lambda part: GatedSpec(part, 4)):
        assert kind(layer) == kind(layer.spec)
    adpt.save(model, tmp_path / "model.safetensors")
    tokens = torch.randint(5, (2, 7))
    assert_close(adpt.load(tmp_path / "model.safetensors")(tokens)[0], model(tokens)[0])  # solvers are not saved
    before = copy.deepcopy(model.state_dict())
    model.reset_parameters()
    assert not torch.equal(before["decoder.weight"], model.decoder.weight)
    assert model.to(torch.float64).blocks[0].layer.cell.dtype == torch.float64
    assert next(Stack(layer, dtype=torch.float64).parameters()).dtype == torch.float64


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.GRU(WIDTH, WIDTH),
        lambda: nn.LSTMCell(WIDTH, WIDTH),
        lambda: cells.from_torch(nn.GRU(WIDTH, WIDTH, 2)),
        lambda: Recurrent(nn.GRUCell(WIDTH, 4), readout=projections.Dense()),
    ],
    ids=["nn.GRU", "nn.LSTMCell", "cell", "layer with a read-out"],
)
def test_containers_take_recurrent_modules_without_a_spec(make):
    given = make()
    layer = given if isinstance(given, Recurrent) else Recurrent(given, batch_first=True)
    stack = Stack(given, 2)
    assert_close(stack(x)[0], layer(layer(x)[0])[0], rtol=0, atol=1e-6)
    model = SequenceModel(given, depth=2, vocabulary=5)
    tokens = torch.randint(5, (2, 7))
    whole, _ = model(tokens)
    logits, _ = model.step(tokens[:, 6], model(tokens[:, :6])[1])
    assert_close(logits, whole[:, 6], rtol=0, atol=1e-5)
    before = [p.clone() for p in model.blocks[1].layer.parameters()]
    model.reset_parameters()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.blocks[1].layer.parameters(), strict=True))
    assert_close(Bidirectional(given)(x)[0].shape, x.shape)
    with pytest.raises(SpecError, match="cannot be stored in a spec"):
        adpt.save(model, "never written.safetensors")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Stack(nn.GRU(WIDTH, 4)), r"maps 6 to 4 features.*readout=projections\.Dense\(\)"),
        (lambda: SequenceModel(nn.Linear(3, 3), vocabulary=4), r"layer=Linear.*Pass e\.g\. ADPTNet\(64\)"),
        (lambda: Stack(ADPTNet(4, batch_first=False)), "batch_first=True"),
        (lambda: SequenceModel(BlockSpec(ADPTNet(4)).build(), vocabulary=4, dropout=0.1), r"Pass block\.spec"),
        (lambda: Recurrent(nn.Linear(3, 3)), "from_torch"),
    ],
)
def test_layers_that_do_not_fit_are_explained(call, message):
    with pytest.raises((SpecError, InputError), match=message):
        call()


def test_solvers_take_layers_in_their_own_layout():
    layer = make_trained()
    late = LayerSpec(layer.spec.cell, batch_first=False).build()
    late.load_state_dict(layer.state_dict())
    reset = torch.zeros(3, 8, dtype=torch.bool)
    reset[1, 4] = True
    expected = layer.solve(x, reset=reset).states
    for solver in (solvers.Sequential(), solvers.DEER(), solvers.Auto(), solvers.BlockWise(solvers.DEER(), 2)):
        assert_close(solver(layer, x, reset=reset).states, expected, rtol=0, atol=1e-5)
        assert_close(solver(late, x.transpose(0, 1), reset=reset.T).states, expected, rtol=0, atol=1e-5)


# A wrapped cell shows its hidden state


def test_a_wrapped_cell_shows_its_hidden_state():
    cell = nn.GRUCell(WIDTH, 9)
    layer = Recurrent(cells.from_torch(cell))
    y, _ = layer(x)
    h = torch.zeros(3, 9)
    for t in range(8):
        h = cell(x[:, t], h)
        assert_close(y[:, t], h, rtol=0, atol=1e-6)
    assert (layer.width, layer.output_size, y.shape) == (WIDTH, 9, (3, 8, 9))
    assert layer.step(x[:, 0])[0].shape == (3, 9)
    mapped = Recurrent(cells.from_torch(cell), readout=projections.Dense())
    assert mapped(x)[0].shape == (3, 8, WIDTH)
    assert Recurrent(cells.GRU(WIDTH, 9))(x)[0].shape == (3, 8, WIDTH)  # the spec has one width, in and out


@pytest.mark.parametrize("inside", ["", "0."])
def test_a_state_dict_from_when_there_was_a_read_out_restores_it(inside):
    cell = nn.GRUCell(WIDTH, 9)
    old = Recurrent(cells.from_torch(cell), readout=projections.Dense())
    saved = {inside + name: value for name, value in old.state_dict().items()}
    layer = Recurrent(cells.from_torch(nn.GRUCell(WIDTH, 9)))
    (nn.Sequential(layer) if inside else layer).load_state_dict(saved)
    assert_close(layer(x)[0], old(x)[0], rtol=0, atol=0)
    assert layer.output_size == WIDTH


# Tensors as states


def test_a_tensor_is_a_state_at_the_first_position():
    layer = ADPTNet(WIDTH, state_size=4)
    h = torch.randn(3, 4, requires_grad=True)
    state = layer.initial_state(3)._replace(state=h)
    for run in (layer, layer.solve, lambda y, s: layer.step(y[:, 0], s), lambda y, s: layer(y, s, solver="deer")):
        found, expected = run(x, h), run(x, state)
        for own, its in zip(
            *((r.states, r.final) if hasattr(r, "final") else r for r in (found, expected)), strict=True
        ):
            assert_close(own, its, rtol=0, atol=0)
    assert_close(layer(x[0], h[0])[0], layer(x[:1], h[:1])[0][0])
    assert torch.autograd.grad(layer(x, h)[0].sum(), h)[0].abs().sum() > 0
    stack = Stack(layer, 2)
    assert_close(stack(x, (h, h))[0], stack(x, (state, state))[0], rtol=0, atol=0)
    assert_close(stack(x, torch.stack((h, h)))[0], stack(x, (state, state))[0], rtol=0, atol=0)
    for bad in (torch.zeros(3, 5), torch.zeros(2, 4), {"h": h}, [h, h]):
        with pytest.raises(InputError, match="state"):
            layer(x, bad)
    with pytest.raises(InputError, match="2 states"):
        stack(x, torch.stack((h, h, h)))


# Text for common choices


def test_text_chooses_what_the_class_of_this_name_does():
    layer = ADPTNet(
        WIDTH, spectrum="linspace", gain="ema", gate="SoftplusGate", retraction="cayley", direction="from-state"
    )
    objects = adpt.spectra.Linspace(), adpt.drive.EMA(), adpt.drive.SoftplusGate(), adpt.retractions.Cayley()
    cell = layer.spec.cell
    assert (cell.spectrum, cell.gain, cell.gate, cell.retraction) == objects
    assert adpt.Spec.from_json(layer.spec.to_json()) == layer.spec
    assert adpt.nn.ADPTRNN(4, 5, spectrum="timescales").spec.cell.spectrum == adpt.spectra.Timescales()
    assert ADPTNet.paper(WIDTH, conjugate="diagonal", beta=0).spec.cell.conjugate == adpt.conjugates.Diagonal()
    assert LayerSpec(cells.GRU(3, 4), readout="dense").readout == projections.Dense()
    for name in (
        "sequential",
        "auto",
        "DEER",
        "quasi-deer",
        "forward_deer",
        "ConvDEER",
        "koopman deer",
        "jacobi",
        "picard",
    ):
        solver = ADPTNet(WIDTH, solver=name).solver
        assert type(solver) is type(getattr(solvers, repr(solver).partition("(")[0])())
        assert_close(layer(x, solver=name)[0], layer(x)[0], rtol=0, atol=1e-5)
    h = x.clone().requires_grad_()
    gradients = [torch.autograd.grad(layer(h, adjoint=a)[0].sum(), h)[0] for a in (None, "checkpointed", "implicit")]
    assert_close(gradients[1], gradients[0])
    assert_close(gradients[2], gradients[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ADPTNet(4, gain="foo"), r"ADPTSpec\(gain='foo'\) is unknown. Pass one of 'ema', 'lru', 'zoh'"),
        (
            lambda: ADPTNet(4, projection="low-rank"),
            r"LowRank has required arguments. Pass projection=LowRank\(\.\.\.\)",
        ),
        (lambda: ADPTNet(4, solver="newton"), r"solver='newton' is unknown. Pass one of 'auto', 'convdeer', 'deer'"),
        (lambda: ADPTNet(4)(torch.randn(1, 2, 4), solver=""), "solver='' is unknown"),
        (lambda: ADPTNet(4, gain="LRU!"), r"gain='LRU!'\) is unknown"),
        (lambda: ADPTNet(4)(torch.randn(1, 2, 4), adjoint="exact"), "'checkpointed', 'implicit', 'unrolled'"),
    ],
)
def test_unknown_text_lists_the_choices(call, message):
    with pytest.raises(SpecError, match=message):
        call()


def test_two_positional_numbers_are_answered_with_the_calls_to_type():
    for make in (ADPTNet, ADPTNet.paper):
        with pytest.raises(SpecError, match=r"Pass ADPTNet\(16, state_size=32\).*nn\.ADPTRNN\(16, 32, 2\)"):
            make(16, 32, 2)


# Names of transformers in `generate`


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return SequenceModel(ADPTNet(8), vocabulary=7)


PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 0, 1]])


def test_greedy_generation_is_the_loop_over_the_whole_model(model):
    tokens = PROMPT
    for _ in range(5):
        tokens = torch.cat((tokens, model(tokens)[0][:, -1:].argmax(-1)), 1)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=5, do_sample=False), tokens)
    assert torch.equal(model.generate(PROMPT, 5, top_p=1e-9), tokens)
    assert torch.equal(model.generate(PROMPT, 5, top_k=1), tokens)
    assert torch.equal(model.generate(PROMPT, 5, temperature=0), tokens)
    assert model.generate(PROMPT, 0).shape == PROMPT.shape


def test_top_p_keeps_the_fewest_tokens_that_reach_p(model):
    probabilities = model(PROMPT)[0][:, -1].softmax(-1)
    p = 0.6
    drawn = torch.stack([model.generate(PROMPT, 1, top_p=p)[:, -1] for _ in range(200)], 1)
    for row, tokens in zip(probabilities, drawn, strict=True):
        ordered, order = row.sort(descending=True)
        kept = order[: int((ordered.cumsum(0) < p).sum()) + 1]
        assert set(tokens.tolist()) <= set(kept.tolist())
        assert len(set(tokens.tolist())) > 1


def test_sequences_end_at_their_own_ends_and_are_padded(model):
    whole = model.generate(PROMPT, 40, generator=torch.Generator().manual_seed(3))
    seeded = {"max_new_tokens": 40, "generator": torch.Generator().manual_seed(3)}
    ended = model.generate(PROMPT, eos_token_id=[2, 5], pad_token_id=6, **seeded)
    for row, full in zip(ended, whole, strict=True):
        end = next(t for t in range(3, 43) if int(full[t]) in (2, 5))
        assert torch.equal(row[: end + 1], full[: end + 1])
        assert (row[end + 1 :] == 6).all()
    assert ended.shape[1] < whole.shape[1]
    assert int(model.generate(PROMPT, 40, eos_token_id=5)[0, -1]) == 5


def test_sequences_of_tokens_and_functions_stop(model):
    generator = torch.Generator()
    whole = model.generate(PROMPT, 60, generator=generator.manual_seed(4))
    pair = whole[0, 10:12].tolist()
    found = model.generate(PROMPT[:1], 60, stop=pair, generator=generator.manual_seed(4))
    full = model.generate(PROMPT[:1], 60, generator=generator.manual_seed(4))
    ends = [t for t in range(4, full.shape[1]) if full[0, t - 1 : t + 1].tolist() == pair]
    assert torch.equal(found, full[:, : ends[0] + 1] if ends else full)
    assert model.generate(PROMPT, 9, stop=[[1], [2, 3]]).shape[1] <= 12
    assert model.generate(PROMPT, 9, stop=lambda tokens: tokens[:, -1] >= 0).shape == (3, 4)
    following = model.generate(PROMPT[:1], 3, top_k=1)[0].tolist()
    stop = following[2:4]  # begins in the prompt, which does not count
    assert model.generate(PROMPT[:1], 3, stop=stop, top_k=1).shape[1] == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, "Pass max_new_tokens="),
        ({"max_length": 3}, "Pass max_new_tokens="),
        ({"top_q": 3}, "'top_k'|'top_p'"),
        ({"top_p": 0.0}, "top_p in"),
        ({"top_p": 1.5}, "top_p in"),
        ({"max_new_tokens": -1}, "an integer >= 0"),
        ({"max_new_tokens": 2.5}, "an integer >= 0"),
    ],
    ids=str,
)
def test_wrong_arguments_of_generate_are_explained(model, options, message):
    with pytest.raises((SpecError, InputError), match=message):
        model.generate(PROMPT, **options)
