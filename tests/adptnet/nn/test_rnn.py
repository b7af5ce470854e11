"""`nn.ADPTRNN`: the contract of `torch.nn.GRU` for arguments, shapes, packed sequences and states."""

import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import adptnet
from adptnet import ADPTNet, cells, conjugates, drive, projections, spectra
from adptnet.errors import IncompatibleError, InputError, SpecError
from adptnet.nn import ADPTRNN, RNNSpec

INPUT, HIDDEN, STEPS, BATCH = 5, 7, 6, 3
LENGTHS = torch.tensor([4, 6, 1])
SETTINGS = [
    {"num_layers": layers, "batch_first": batch_first, "bidirectional": both, "bias": bias}
    for layers, batch_first, both, bias in itertools.product((1, 3), (False, True), (False, True), (False, True))
]


@pytest.fixture(autouse=True)
def in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def make_pair(**settings):
    """Return an ADPTRNN and an nn.GRU with the same arguments."""
    return ADPTRNN(INPUT, HIDDEN, **settings, beta=1.0), nn.GRU(INPUT, HIDDEN, **settings)


def loop(rnn, x, hx=None):
    """Run one sequence (time, features) step by step through the cells; return the outputs and h_n."""
    finals = []
    for _ in range(rnn.num_layers):
        outputs = []
        for direction in range(rnn.num_directions):
            cell = rnn.cells[len(finals)]
            state = cell.initial_state(1)[0] if hx is None else hx[len(finals)]
            ordered = x.flip(0) if direction else x
            drives = cell.prepare(ordered, torch.arange(len(x)))
            states = []
            for t in range(len(x)):
                state = cell.step(state, drives[t])
                states.append(cell.output(state))
            outputs.append(torch.stack(states[::-1] if direction else states))
            finals.append(state)
        x = torch.cat(outputs, -1)
    return x, torch.stack(finals)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_shapes_are_those_of_the_gru(settings):
    ours, gru = make_pair(**settings)
    batched = torch.randn(*((BATCH, STEPS) if settings["batch_first"] else (STEPS, BATCH)), INPUT)
    packed = [
        pack_padded_sequence(batched, lengths, batch_first=settings["batch_first"], enforce_sorted=is_sorted)
        for lengths, is_sorted in ((LENGTHS, False), (LENGTHS.sort(descending=True)[0], True))
    ]
    for x in (batched, batched[0], *packed):
        size = () if isinstance(x, torch.Tensor) and x.dim() == 2 else (BATCH,)
        for hx in (None, torch.randn(len(ours.cells), *size, HIDDEN)):
            (output, final), (expected, expected_final) = ours(x, hx), gru(x, hx)
            if isinstance(expected, PackedSequence):
                assert output.data.shape == expected.data.shape
                for own, its in zip(output[1:], expected[1:], strict=True):
                    assert its is None if own is None else torch.equal(own, its)
            else:
                assert output.shape == expected.shape
            assert final.shape == expected_final.shape
            assert final.dtype == expected_final.dtype


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_values_and_gradients_are_those_of_a_loop_over_the_cells(settings):
    rnn = ADPTRNN(INPUT, HIDDEN, **settings, beta=1.0)
    x = torch.randn(BATCH, STEPS, INPUT, requires_grad=True)
    hx = torch.randn(len(rnn.cells), BATCH, HIDDEN, requires_grad=True)
    output, final = rnn(x if settings["batch_first"] else x.transpose(0, 1), hx)
    output = output if settings["batch_first"] else output.transpose(0, 1)
    expected, expected_final = zip(*(loop(rnn, x[i], hx[:, i]) for i in range(BATCH)), strict=True)
    expected, expected_final = torch.stack(expected), torch.stack(expected_final, 1)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(final, expected_final, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(output), torch.randn_like(final)
    tensors = [x, hx, *rnn.parameters()]
    for own, its in zip(
        torch.autograd.grad([output, final], tensors, weights),
        torch.autograd.grad([expected, expected_final], tensors, weights),
        strict=True,
    ):
        torch.testing.assert_close(own, its, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_packed_batch_gives_each_sequence_alone(bidirectional):
    """Sequences in any order, with states in the order before packing, values and gradients."""
    rnn = ADPTRNN(INPUT, HIDDEN, 2, bidirectional=bidirectional, beta=1.0)
    sequences = [torch.randn(int(n), INPUT, requires_grad=True) for n in LENGTHS]
    hx = torch.randn(len(rnn.cells), BATCH, HIDDEN, requires_grad=True)
    packed, final = rnn(pack_sequence(sequences, enforce_sorted=False), hx)
    outputs, lengths = pad_packed_sequence(packed)
    assert torch.equal(lengths, LENGTHS)
    alone = [rnn(sequence, hx[:, i]) for i, sequence in enumerate(sequences)]
    for i, (output, state) in enumerate(alone):
        torch.testing.assert_close(outputs[: LENGTHS[i], i], output, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(final[:, i], state, rtol=1e-12, atol=1e-12)
    total = packed.data.square().sum() + final.sum()
    expected = sum(output.square().sum() + state.sum() for output, state in alone)
    for own, its in zip(
        torch.autograd.grad(total, [*sequences, hx]), torch.autograd.grad(expected, [*sequences, hx]), strict=True
    ):
        torch.testing.assert_close(own, its, rtol=1e-9, atol=1e-10)


def test_a_sequence_in_two_parts_is_the_whole_and_no_state_is_a_zero_state():
    rnn = ADPTRNN(INPUT, HIDDEN, 2, beta=1.0)
    x = torch.randn(STEPS, BATCH, INPUT)
    whole, final = rnn(x)
    first, state = rnn(x[:2])
    second, last = rnn(x[2:], state)
    torch.testing.assert_close(torch.cat((first, second)), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last, final, rtol=1e-12, atol=1e-12)
    assert torch.equal(rnn(x, torch.zeros(2, BATCH, HIDDEN))[0], whole)


def test_dropout_is_between_layers_and_in_training_only():
    rnn = ADPTRNN(INPUT, HIDDEN, 2, dropout=0.5, beta=1.0)
    x = torch.randn(STEPS, BATCH, INPUT)
    _, (first, second) = rnn(x)
    _, (again, other) = rnn(x)
    assert torch.equal(first, again)  # the first layer has no dropout
    assert not torch.equal(second, other)
    assert torch.equal(rnn.eval()(x)[0], rnn(x)[0])
    with pytest.warns(UserWarning, match="there is only one"):
        ADPTRNN(INPUT, HIDDEN, dropout=0.5)


def test_the_bias_is_that_of_the_input_projection():
    biased, unbiased = (ADPTRNN(INPUT, HIDDEN, bias=bias).cells[0].drive.input_projection for bias in (True, False))
    assert biased.bias.shape == (HIDDEN,)
    assert not hasattr(unbiased, "bias")
    assert ADPTRNN(INPUT, HIDDEN).bias
    assert not ADPTRNN(INPUT, HIDDEN, bias=False).bias
    assert not ADPTRNN(INPUT, HIDDEN, input_projection=projections.Orthogonal()).bias
    with pytest.raises(IncompatibleError, match="Drop bias=False"):
        ADPTRNN(INPUT, HIDDEN, bias=False, input_projection=projections.Dense(bias=True))


@pytest.mark.parametrize(
    ("axes", "state_size"),
    [
        ({"spectrum": spectra.S4DInv(), "gate": drive.SoftplusGate()}, 8),
        ({"memory": cells.SlowMemory()}, 16),
        ({"conjugate": conjugates.Stateful()}, 8 + 64),
        ({"beta": 0.0}, 8),
    ],
    ids=str,
)
def test_every_component_can_be_chosen_and_a_state_may_be_larger_than_the_output(axes, state_size):
    rnn = ADPTRNN(INPUT, 8, 2, bidirectional=True, **{"beta": 0.5, **axes})
    output, final = rnn(torch.randn(STEPS, BATCH, INPUT))
    assert output.shape == (STEPS, BATCH, 16)
    assert final.shape == (4, BATCH, rnn.state_size) == (4, BATCH, state_size)
    expected, _ = loop(rnn, (x := torch.randn(STEPS, INPUT)))
    torch.testing.assert_close(rnn(x)[0], expected, rtol=1e-11, atol=1e-11)


def test_it_saves_loads_copies_resets_and_describes_itself(tmp_path):
    rnn = ADPTRNN(INPUT, HIDDEN, 2, bidirectional=True, dropout=0.1, batch_first=True, beta=0.5).eval()
    x = torch.randn(BATCH, STEPS, INPUT)
    adptnet.save(rnn, tmp_path / "rnn.safetensors")
    loaded = adptnet.load(tmp_path / "rnn.safetensors").eval()
    assert loaded.spec == rnn.spec == adptnet.Spec.from_json(rnn.spec.to_json())
    for copy in (loaded, pickle.loads(pickle.dumps(rnn))):
        assert torch.equal(copy(x)[0], rnn(x)[0])
    assert rnn.flatten_parameters() is None
    assert (rnn.input_size, rnn.hidden_size, rnn.num_layers, rnn.dropout) == (INPUT, HIDDEN, 2, 0.1)
    assert (rnn.batch_first, rnn.bidirectional) == (True, True)
    assert "5, 7, num_layers=2, bias=True, batch_first=True, dropout=0.1, bidirectional=True, beta=0.5" in repr(rnn)
    before = rnn(x)[0]
    rnn.reset_parameters()
    assert not torch.equal(rnn(x)[0], before)


def test_half_precision_keeps_the_state_in_float32():
    rnn = ADPTRNN(INPUT, HIDDEN, dtype=torch.bfloat16)
    output, final = rnn(torch.randn(STEPS, BATCH, INPUT, dtype=torch.bfloat16))
    assert (output.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    rnn(torch.randn(STEPS, BATCH, INPUT, dtype=torch.bfloat16), final.bfloat16())


def test_meta_export_and_symbolic_traces_work():
    rnn = ADPTRNN(INPUT, HIDDEN, 2, bidirectional=True)
    output, final = ADPTRNN(INPUT, HIDDEN, 2, device="meta")(torch.empty(STEPS, BATCH, INPUT, device="meta"))
    assert (output.shape, final.shape) == ((STEPS, BATCH, HIDDEN), (2, BATCH, HIDDEN))
    x = torch.randn(STEPS, BATCH, INPUT)
    torch.testing.assert_close(torch.export.export(rnn, (x,)).module()(x), rnn(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = rnn

        def forward(self, x):
            return self.rnn(x)[0]

    assert torch.equal(torch.fx.symbolic_trace(Model())(x), rnn(x)[0])


WRONG_CALLS = {
    "features": (torch.zeros(STEPS, BATCH, INPUT + 1), None, "Build it with input_size=6"),
    "dimensions": (torch.zeros(INPUT), None, "2 or 3 dimensions"),
    "packed features": (pack_sequence([torch.zeros(3, INPUT + 1)]), None, "Build it with input_size=6"),
    "integers": (torch.zeros(STEPS, BATCH, INPUT, dtype=torch.int64), None, "floating point"),
    "a list": ([[0.0] * INPUT], None, "must be a tensor"),
    "hidden batch": (torch.zeros(STEPS, BATCH, INPUT), torch.zeros(2, BATCH + 1, HIDDEN), r"\(2, 3, 7\)"),
    "hidden layers": (torch.zeros(STEPS, BATCH, INPUT), torch.zeros(1, BATCH, HIDDEN), r"\(2, 3, 7\)"),
    "hidden size": (torch.zeros(STEPS, BATCH, INPUT), torch.zeros(2, BATCH, HIDDEN + 1), r"\(2, 3, 7\)"),
    "hidden without batch": (torch.zeros(STEPS, BATCH, INPUT), torch.zeros(2, HIDDEN), r"\(2, 3, 7\)"),
    "batch with one sequence": (torch.zeros(STEPS, INPUT), torch.zeros(2, 1, HIDDEN), r"squeeze\(1\)"),
    "a pair, as of an LSTM": (torch.zeros(STEPS, BATCH, INPUT), (torch.zeros(2, BATCH, HIDDEN),) * 2, "got tuple"),
    "a pair, one sequence": (torch.zeros(STEPS, INPUT), (torch.zeros(2, HIDDEN),) * 2, "got tuple"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls_get_an_error_with_what_to_pass(name):
    x, hx, message = WRONG_CALLS[name]
    to = torch.get_default_dtype()
    x = x.to(to) if isinstance(x, (torch.Tensor, PackedSequence)) and name != "integers" else x
    hx = hx.to(to) if isinstance(hx, torch.Tensor) else hx
    with pytest.raises(InputError, match=message):
        ADPTRNN(INPUT, HIDDEN, 2)(x, hx)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be an integer"),
        ({"input_size": 2.5}, "input_size must be an integer"),
        ({"num_layers": 0}, "num_layers must be an integer"),
        ({"dropout": 1.5, "num_layers": 2}, r"dropout must be in \[0, 1\)"),
        ({"bidirectional": 2}, "True or False"),
        ({"batch_first": "yes"}, "True or False"),
        ({"width": 3}, "Pass input_size="),
        ({"depth": 3}, "Pass num_layers="),
        ({"spectrun": 3}, "spectrum"),
        ({"proj_size": 3}, "no argument 'proj_size'"),
        ({"rope": drive.RoPE()}, "no argument 'rope'"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(SpecError, match=message):
        ADPTRNN(**{"input_size": INPUT, "hidden_size": HIDDEN, **arguments})


def test_a_spec_with_positions_is_rejected():
    with pytest.raises(IncompatibleError, match="Drop rope="):
        RNNSpec(cells.ADPTSpec(4, rope=drive.RoPE()))


@pytest.mark.parametrize("name", ["input_size", "hidden_size", "d_model", "dim", "embed_dim", "features"])
def test_other_names_of_the_width_are_answered_with_the_name_to_type(name):
    with pytest.raises(SpecError, match=f"no argument '{name}'. Pass width=.*ADPTRNN"):
        ADPTNet(**{name: 8})


def test_a_layer_without_a_width_is_answered_with_what_to_type():
    with pytest.raises(SpecError, match=r"Pass ADPTNet\(64\)"):
        ADPTNet(beta=1.0)
