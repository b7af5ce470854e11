"""Tests of Copy Memory, Selective Copy and parity against brute force and published statistics."""

import pytest
import torch
import tyro
from torch.nn.functional import one_hot

from adptnet import ADPTNet, Spec
from adptnet.errors import InputError, SpecError
from adptnet.nn import BlockSpec
from adptnet_lab.tasks import SELECTIVE_COPY_SETTINGS, TASKS, CopyMemory, Parity, SelectiveCopy, get_task
from adptnet_lab.tasks.base import IGNORED, make_generator


def rows(batch):
    return zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)


@pytest.mark.parametrize("length", [21, 64, 128])
def test_copy_memory_matches_its_description(length):
    task = CopyMemory(length=length, training_sequences=300)
    batch = task.examples("train", torch.arange(300))
    for inputs, targets in rows(batch):
        symbols = inputs[:10]
        assert all(1 <= symbol <= 8 for symbol in symbols)
        assert inputs[10:] == [0] * (length - 21) + [9] * 11
        assert targets == [IGNORED] * (length - 10) + symbols
    share = torch.bincount(batch.inputs[:, :10].flatten(), minlength=9)[1:] / 3000
    assert (share - 1 / 8).abs().max() < 0.03


def test_the_seed_determines_the_set_and_a_smaller_set_is_a_prefix():
    every = torch.arange(300)
    few, many = CopyMemory(training_sequences=300), CopyMemory(training_sequences=10_000)
    assert torch.equal(few.examples("train", every).inputs, many.examples("train", every).inputs)
    other = CopyMemory(training_sequences=300, seed=1)
    assert not torch.equal(few.examples("train", every).inputs, other.examples("train", every).inputs)
    assert not torch.equal(many.examples("train", every).inputs, many.examples("test", every).inputs)
    assert not torch.equal(many.examples("validation", every).inputs, many.examples("test", every).inputs)
    assert (many.size("train"), many.size("test"), many.training_size) == (10_000, 1_000, 10_000)
    with pytest.raises(InputError, match="indices from 0 to 300: the train set has 300 sequences"):
        few.examples("train", torch.arange(301))


def test_predicting_zero_scores_nothing_on_copy_memory():
    task = CopyMemory()
    batch = next(task.evaluation("test", 100, 100))
    silent = one_hot(torch.zeros_like(batch.targets), 10)
    assert task.scores(silent, batch.targets) == {"accuracy": 0.0, "whole_sequence": 0.0}
    right = one_hot(batch.targets.clamp(min=0), 10)
    right[0, -1] = one_hot(torch.tensor(0), 10)
    assert task.scores(right, batch.targets) == pytest.approx({"accuracy": 0.999, "whole_sequence": 0.99})
    assert task.loss(right * 50.0, batch.targets) < 0.1
    assert task.chance == 0.125


def test_copy_memory_with_scalar_inputs():
    task, tokens = CopyMemory(encoding="scalar"), CopyMemory()
    batch = task.training_batch(0, 7, 0)
    assert batch.inputs.shape == (7, 64, 1)
    assert torch.equal(batch.inputs.squeeze(-1), tokens.training_batch(0, 7, 0).inputs.double())
    assert (task.vocabulary, task.input_size, task.output_size) == (None, 1, 10)


@pytest.mark.parametrize("task", SELECTIVE_COPY_SETTINGS.values(), ids=SELECTIVE_COPY_SETTINGS)
def test_selective_copy_matches_its_description(task):
    marker, count = task.vocabulary - 1, task.symbols
    for inputs, targets in rows(task.batch(40, make_generator(3))):
        assert len(inputs) == len(targets) == task.length
        assert inputs[-count:] == [marker] * count
        symbols = [token for token in inputs[:-count] if token != 0]
        assert targets == [IGNORED] * (task.length - count) + symbols
        assert all(1 <= symbol < marker for symbol in symbols)
        if not task.variable:
            assert inputs[:count] == symbols


def test_gaps_agree_with_the_published_statistics_of_s4():
    """At 256 steps the noise between symbols is 13.1 ± 12.8 steps; MAD's selective copying has 13.9 ± 3.6."""
    inputs = SelectiveCopy(length=256).batch(2000, make_generator(0)).inputs[:, :-16]
    positions = inputs.nonzero()[:, 1].reshape(2000, 16)
    gaps = (positions.diff(dim=-1) - 1).double()
    assert float(gaps.mean()) == pytest.approx(13.1, abs=0.15)
    assert float(gaps.std()) == pytest.approx(12.8, abs=0.25)


def test_all_sets_of_positions_are_equally_likely():
    task = SelectiveCopy(length=7, symbols=2, vocabulary=3)
    inputs = task.batch(10_000, make_generator(0)).inputs[:, :5]
    patterns = torch.bincount((inputs > 0).long() @ (2 ** torch.arange(5)))
    assert sorted(patterns[patterns > 0].tolist())[0] > 900  # all ten patterns occur about equally often
    assert len(patterns[patterns > 0]) == 10


def test_the_length_may_count_only_the_noise():
    task = SelectiveCopy(length=100, length_of="noise")
    assert task.batch(2, make_generator(0)).inputs.shape == (2, 132)
    assert task.batch(2, make_generator(0), length=10).inputs.shape == (2, 42)
    assert SelectiveCopy().chance == 1 / 14


def test_parity_against_a_loop():
    for every_step in (False, True):
        task = Parity(length=12, every_step=every_step)
        batch = task.batch(500, make_generator(1))
        assert sorted(set(batch.lengths.tolist())) == list(range(3, 13))
        for (inputs, targets), length in zip(rows(batch), batch.lengths.tolist(), strict=True):
            odd = 0
            for t in range(12):
                odd ^= inputs[t]
                counted = t < length and (every_step or t == length - 1)
                assert targets[t] == (odd if counted else IGNORED)
                assert t < length or inputs[t] == 0
    long = task.batch(5, make_generator(1), length=40)
    assert long.inputs.shape == (5, 40)
    assert long.lengths is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CopyMemory(length=20), "needs at least 21 steps"),
        (lambda: CopyMemory(encoding="floats"), 'pass encoding="tokens"'),
        (lambda: CopyMemory(training_sequences=0), "training_sequences must be an integer >= 1"),
        (lambda: CopyMemory(seed=-1), "seed must be an integer >= 0"),
        (lambda: next(CopyMemory().evaluation("test", 4, 2, length=9)), "needs at least 21 steps"),
        (lambda: SelectiveCopy(length=31), "Pass length=32 or more"),
        (lambda: SelectiveCopy(vocabulary=2), "need at least 3"),
        (lambda: SelectiveCopy(length_of="total"), 'pass "sequence" or "noise"'),
        (lambda: SelectiveCopy(symbols=0), "symbols must be an integer >= 1"),
        (lambda: SelectiveCopy().batch(0, make_generator(0)), "must be at least 1"),
        (lambda: Parity(length=2), "Pass shortest=2 or less"),
        (lambda: Parity().batch(4, make_generator(0), length=0), "both must be at least 1"),
        (lambda: get_task("copy-memmory"), "Perhaps you meant 'copy-memory'"),
        (lambda: get_task("imagenet"), "Known: copy-memory, "),
    ],
)
def test_invalid_arguments_raise(make, message):
    with pytest.raises((SpecError, InputError), match=message):
        make()


def test_every_task_has_a_name_a_spec_and_a_model():
    block = BlockSpec(ADPTNet.paper(4).spec)
    for name, kind in TASKS.items():
        assert get_task(name) is kind
        task = kind()
        assert Spec.from_json(task.to_json()) == task
        if name not in ("event-frames", "sequential-image", "text"):  # these need their data
            assert (task.vocabulary is None) != (task.input_size is None)
            assert task.chance > 0
            x = torch.zeros(2, 5, dtype=torch.int64) if task.vocabulary else torch.zeros(2, 5, task.input_size)
            assert task.model(block).build()(x)[0].shape == (2, 5, task.output_size)


def test_every_task_can_be_given_on_the_command_line():
    for kind in TASKS.values():
        assert tyro.cli(kind, args=[]) == kind()
    assert tyro.cli(SelectiveCopy, args=["--length", "40", "--no-variable"]) == SelectiveCopy(40, variable=False)
    assert tyro.cli(get_task("forecast"), args=["--system", "x' = -x"]) == get_task("forecast")("x' = -x")
