"""Tests of the MAD suite against brute force and published facts."""

import collections

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot
from torch.testing import assert_close

from adptnet import ADPTNet, Spec, load, save
from adptnet.errors import InputError, SpecError
from adptnet.nn import AutoEncoderSpec, BlockSpec, SwiGLUBlockSpec
from adptnet_lab.baselines import Mamba
from adptnet_lab.tasks import (
    MAD_OPTIMIZERS,
    MadCompression,
    MadFuzzyRecall,
    MadInContextRecall,
    MadMemorisation,
    MadNoisyRecall,
    MadSelectiveCopying,
    mad_score,
    mad_settings,
)
from adptnet_lab.tasks.base import IGNORED, make_generator
from adptnet_lab.tasks.mad.base import find_first_occurrence

NAMES = ["memorisation", "selective-copying", "compression", "in-context-recall", "fuzzy-recall", "noisy-recall"]


def draw_batch(task, size, split="test", seed=0):
    return task.draw(size, make_generator(seed), length=task.length, split=split)


def rows(batch):
    return zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)


def test_the_first_occurrence_against_a_loop():
    codes = torch.randint(5, (50, 13))
    expected = [[row.index(value) for value in row] for row in codes.tolist()]
    assert find_first_occurrence(codes).tolist() == expected


def test_the_ceiling_of_memorisation_agrees_with_the_published_value():
    settings = mad_settings("memorisation")
    assert [task.facts for task in settings] == [127, 255, 511, 1023, 2047, 4095]
    assert 100 * sum(task.ceiling for task in settings) / 6 == pytest.approx(91.31, abs=0.005)
    for task in settings[3:]:
        shown = task.examples("train", torch.arange(256)).inputs[:, ::2].unique()
        assert len(shown) / task.facts == pytest.approx(task.ceiling, abs=0.015)


def test_facts_are_paired_as_in_the_reference():
    # The reference shuffles lists of tuples of keys and values with one NumPy generator and zips them.
    generator = np.random.default_rng(12345)
    keys, values = [(i,) for i in range(127)], [(i,) for i in range(127, 255)]
    generator.shuffle(keys)
    generator.shuffle(values)
    pairs = {key[0]: value[0] for key, value in zip(keys, values, strict=False)}
    assert MadMemorisation().values().tolist() == [pairs[key] for key in range(127)]


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_target_of_memorisation_is_the_value_at_the_insert_token(split):
    task = MadMemorisation(vocabulary=64, noise=0.3, noise_vocabulary=16)
    values = task.values().tolist()
    noisy = 0
    for inputs, targets in rows(draw_batch(task, 200, split)):
        real = 0
        for t in range(0, 32, 2):
            if inputs[t] < task.facts:
                assert inputs[t + 1] == 63
                assert targets[t : t + 2] == [IGNORED, values[inputs[t]]]
                real += 1
            else:
                assert all(47 <= token < 63 for token in inputs[t : t + 2])
                assert targets[t : t + 2] == [IGNORED, IGNORED]
                noisy += 1
        assert real >= 1
    assert noisy / 3200 == pytest.approx(0.3 * 15 / 16, abs=0.02)


def test_selective_copying_against_a_loop():
    task = MadSelectiveCopying(length=60, tokens_to_copy=7)
    for inputs, targets in rows(draw_batch(task, 200)):
        assert inputs[-8:] == [15] + [14] * 7
        tokens = [token for token in inputs[:-8] if token != 14]
        assert targets == [IGNORED] * 53 + tokens
        assert inputs[-9] != 14  # the last token is immediately followed by the copy token


def test_blanks_are_distributed_as_in_the_reference():
    """Gaps are 13.9 ± 3.6 at 256 steps, and have the distribution of inserting blanks one by one."""
    task = MadSelectiveCopying()
    found = [
        np.diff([-1, *(t for t, token in enumerate(inputs[:-17]) if token != 14)]) - 1
        for inputs, _ in rows(draw_batch(task, 2000))
    ]
    assert np.mean(found) == pytest.approx(13.9, abs=0.05)
    assert np.std(found) == pytest.approx(3.6, abs=0.05)
    generator = np.random.default_rng(0)
    brute = []
    for _ in range(500):
        tokens = np.insert(np.zeros(16, int), generator.integers(0, 16, 223), 1)
        brute.append(np.diff([-1, *np.nonzero(tokens == 0)[0]]) - 1)
    assert np.std(found) == pytest.approx(np.std(brute), abs=0.08)
    assert np.mean(found, 0) == pytest.approx(np.mean(brute, 0), abs=1.0)


def test_every_token_is_a_target_of_compression():
    batch = draw_batch(MadCompression(), 300)
    assert torch.equal(batch.inputs, batch.targets)
    assert bool((batch.inputs[:, -1] == 15).all())
    assert torch.bincount(batch.inputs[:, :-1].flatten(), minlength=15).min() > 500
    noisy = draw_batch(MadCompression(vocabulary=32, noise=0.25, noise_vocabulary=16), 300)
    share = ((noisy.inputs[:, :-1] >= 15) & (noisy.inputs[:, :-1] < 31)).double().mean()
    assert float(share) == pytest.approx(0.25, abs=0.02)
    assert torch.equal(noisy.inputs, noisy.targets)


def recall_targets(sequence, keys, noise, multi_query):
    """Return the targets of a sequence of pairs by a dictionary; noise has no target."""
    known, targets = {}, []
    prefix = 0 if multi_query else 1
    body = sequence[: -2 - prefix]
    for key, value in zip(body[::2], body[1::2], strict=True):
        if key >= noise:
            targets += [IGNORED, IGNORED]
            continue
        assert key < keys <= value < noise
        targets += [IGNORED, value if key in known and multi_query else IGNORED]
        assert known.setdefault(key, value) == value
    assert known[sequence[-2]] == sequence[-1]
    return targets + [IGNORED] * (1 + prefix) + [sequence[-1]]


@pytest.mark.parametrize("multi_query", [True, False])
@pytest.mark.parametrize("noise", [0.0, 0.2, 0.8])
def test_in_context_recall_against_a_dictionary(multi_query, noise):
    if noise:
        task = MadNoisyRecall(length=64, noise=noise, multi_query=multi_query)
        keys, first_noise = (16 - (not multi_query)) // 2, 16 - (not multi_query)
    else:
        task = MadInContextRecall(length=64, multi_query=multi_query)
        keys, first_noise = (16 - (not multi_query)) // 2, 16 - (not multi_query)
    train, test = draw_batch(task, 300, "train"), draw_batch(task, 300, "test")
    assert train.inputs.shape == (300, 63 if multi_query else 64)
    assert torch.equal(train.inputs, test.inputs)  # only the targets differ
    assert torch.equal(train.inputs[:, 1:], train.targets[:, :-1])
    for (inputs, training), (_, testing) in zip(rows(train), rows(test), strict=True):
        sequence = [*inputs, training[-1]]
        assert testing == recall_targets(sequence, keys, first_noise, multi_query)[1:]
        assert multi_query or inputs[-2] == task.vocabulary - 1
    pairs = train.inputs[:, : 2 * 31 : 2]
    share = float(((pairs >= first_noise) & (pairs < first_noise + 16)).double().mean())
    assert share == pytest.approx(noise * 30 / 31, abs=0.02)


def test_the_probe_is_uniform_over_the_keys_that_occur():
    task = MadInContextRecall(vocabulary=4, length=8)  # three pairs of two keys, and the probe
    inputs = draw_batch(task, 20_000).inputs
    keys, probe = inputs[:, :6:2], inputs[:, 6]
    both = keys.unique(dim=0)
    assert len(both) == 8
    once = keys.sum(-1) == 1  # key 1 once, key 0 twice
    assert float(probe[once].double().mean()) == pytest.approx(0.5, abs=0.02)


def motifs(tokens, keys, noise):
    """Split tokens into runs of key tokens, value tokens and noise."""
    kind_of = ["key" if t < keys else "value" if t < noise else "noise" for t in tokens]
    runs = []
    for kind, token in zip(kind_of, tokens, strict=True):
        if not runs or runs[-1][0] != kind:
            runs.append((kind, []))
        runs[-1][1].append(token)
    return [(kind, tuple(run)) for kind, run in runs]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("multi_query", [True, False])
def test_fuzzy_recall_against_a_dictionary(split, multi_query):
    task = MadFuzzyRecall(length=60, multi_query=multi_query)
    padding = 15 if multi_query else 14
    key_sizes, repeats = collections.Counter(), 0
    for inputs, due in rows(draw_batch(task, 400, split)):
        whole = [*inputs, due[-1]]
        body = whole[next(t for t, token in enumerate(whole) if token != padding) :]
        if not multi_query:
            cut = body.index(15)
            assert motifs(body[:cut], 7, 14)[-1][0] == "value"
            body = body[:cut] + body[cut + 1 :]
        runs = motifs(body, 7, 15)
        assert [kind for kind, _ in runs] == ["key", "value"] * (len(runs) // 2)
        known, expected = {}, []
        for i in range(0, len(runs), 2):
            key, value = runs[i][1], runs[i + 1][1]
            last = i == len(runs) - 2
            assert len(set(key)) == len(key) <= 3
            assert len(set(value)) == len(value) <= 3
            key_sizes[len(key)] += 1
            seen = key in known
            assert seen or not last  # the probe occurs before its query
            assert known.setdefault(key, value) == value
            repeats += seen
            asks = last or (seen and multi_query)
            expected += [IGNORED] * (len(key) + (last and not multi_query)) + [v if asks else IGNORED for v in value]
        expected = [IGNORED] * (61 - len(expected)) + expected
        assert due == (whole[1:] if split == "train" else expected[1:])
    assert repeats > 400  # the probes and other repetitions
    if split == "test":
        assert set(key_sizes) == {3}
    else:
        share = np.array([key_sizes[n] for n in (1, 2, 3)]) / key_sizes.total()
        assert share == pytest.approx([1 / 3] * 3, abs=0.03)


def generate_fuzzy_sequence(generator, length, train):
    """Generate a sequence pair by pair; return its number of pairs before the query and its number of tokens."""
    sizes = lambda: (generator.integers(1, 4) if train else 3, generator.integers(1, 4))  # noqa: E731
    choose = lambda low, high, count: tuple(generator.permutation(np.arange(low, high))[:count])  # noqa: E731
    probe_sizes = sizes()
    probe = choose(0, 7, probe_sizes[0])
    value_of = {probe: choose(7, 15, probe_sizes[1])}
    at = generator.integers(0, length - 2 * sum(probe_sizes))
    used, pairs, shown = 0, 0, False
    while used < length - sum(probe_sizes) - 6:
        key_size, value_size = sizes()
        key = probe if used >= at and not shown else choose(0, 7, key_size)
        shown |= key == probe
        value = value_of.setdefault(key, choose(7, 15, value_size))
        used, pairs = used + len(key) + len(value), pairs + 1
    return pairs, used + sum(probe_sizes)


@pytest.mark.parametrize("split", ["train", "test"])
def test_fuzzy_recall_has_the_lengths_of_a_loop_over_pairs(split):
    task = MadFuzzyRecall(length=60)
    batch = draw_batch(task, 3000, split)
    tokens = (batch.inputs != 15).sum(-1).double() + 1
    pairs = ((batch.inputs[:, 1:] < 7) & (batch.inputs[:, :-1] >= 7)).sum(-1).double() - 1
    generator = np.random.default_rng(0)
    brute = np.array([generate_fuzzy_sequence(generator, 60, split == "train") for _ in range(1000)])
    for found, expected in ((pairs, brute[:, 0]), (tokens, brute[:, 1])):
        assert float(found.mean()) == pytest.approx(expected.mean(), abs=5 * expected.std() / 1000**0.5)
        assert float(found.std()) == pytest.approx(expected.std(), rel=0.1)


def test_noise_has_no_target_in_fuzzy_recall():
    task = MadFuzzyRecall(vocabulary=32, noise=0.4, noise_vocabulary=16, length=60)
    batch = draw_batch(task, 300)
    noisy = (batch.inputs >= 15) & (batch.inputs < 31)
    assert 0.2 < float(noisy.double().mean()) < 0.45
    assert not bool(((batch.targets >= 15) & (batch.targets != IGNORED)).any())
    assert bool((batch.targets[:, -1] != IGNORED).all())


def test_accuracy_is_the_mean_over_classes_of_one_batch():
    task = MadInContextRecall()
    targets = torch.tensor([[3, 3, 3, 5, IGNORED], [3, 7, IGNORED, IGNORED, IGNORED]])
    predictions = torch.tensor([[3, 3, 3, 0, 3], [0, 7, 1, 1, 1]])
    scores = task.scores(one_hot(predictions, 16), targets)
    assert scores["accuracy"] == pytest.approx((3 / 4 + 0 + 1) / 3)
    assert scores["plain_accuracy"] == pytest.approx(4 / 6)


def test_a_constant_prediction_of_compression_scores_two_classes():
    task = MadCompression()
    batch = draw_batch(task, 1280)
    guess = torch.zeros_like(batch.targets)
    guess[:, -1] = 15
    scores = task.scores(one_hot(guess, 16), batch.targets)
    assert scores["accuracy"] == 2 / 16 == task.chance
    assert scores["plain_accuracy"] == pytest.approx(0.096, abs=0.003)


def test_the_grid_has_66_settings_that_change_one_field_each():
    counts = [len(mad_settings(name)) for name in NAMES]
    assert counts == [6, 13, 11, 11, 11, 14]
    assert sum(counts) * len(MAD_OPTIMIZERS) == 396
    for name in NAMES:
        baseline, *varied = mad_settings(name)
        assert Spec.from_json(baseline.to_json()) == baseline
        assert baseline.test_sequences == 1280
        for task in varied:
            changed = [f for f in type(task).__dataclass_fields__ if getattr(task, f) != getattr(baseline, f)]
            assert len(changed) == 1
            task.draw(2, make_generator(0), length=task.length, split="test")
    with pytest.raises(InputError, match="Perhaps you meant 'compression'"):
        mad_settings("compresion")


def test_a_score_is_the_best_run_of_each_setting_averaged():
    assert mad_score([[0.1, 0.9], [0.5, 0.3, 0.2]]) == pytest.approx(0.7)
    with pytest.raises(InputError, match="at least one accuracy"):
        mad_score([[0.5], []])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MadMemorisation(vocabulary=2), "need at least 3"),
        (lambda: MadMemorisation(noise=0.1), "Pass noise_vocabulary=16 and vocabulary=272"),
        (lambda: MadMemorisation(noise=1.0, noise_vocabulary=2), "nothing but noise"),
        (lambda: MadMemorisation(noise_vocabulary=-1), "must be an integer >= 0"),
        (lambda: MadMemorisation(vocabulary=40_000), "at most 32768"),
        (lambda: MadSelectiveCopying(length=33), "Pass length=34 or more"),
        (lambda: MadCompression(length=1), "at least 2 steps"),
        (lambda: MadInContextRecall(length=127), "key-value pairs need an even length. Pass 128"),
        (lambda: MadNoisyRecall(vocabulary=18), "keys, values and noise need at least 19 tokens"),
        (lambda: MadFuzzyRecall(length=12), "need length=13 or more"),
        (lambda: MadFuzzyRecall(vocabulary=6), "motifs of 3 distinct tokens need at least 7 tokens"),
        (lambda: next(MadInContextRecall().evaluation("test", 2, 2, length=9)), "even length"),
    ],
)
def test_invalid_settings_raise(make, message):
    with pytest.raises(SpecError, match=message):
        make()


@pytest.fixture
def block():
    return BlockSpec(ADPTNet.paper(10).spec, norm="rms")


def test_the_auto_encoder_matches_its_definition(block):
    model = MadCompression().model(block, depth=2).build().eval()
    for parameter in model.parameters():  # so that no parameter keeps its initial value
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randint(16, (3, 9))
    logits, states = model(x)
    y = model.encoder.weight[x]
    for layer in model.blocks:
        y, _ = layer(y)
    code = model.norm(y)[:, -1]
    assert len(states) == 2
    for t in range(9):
        z = code.clone()
        for j in range(0, 10, 2):
            z[:, j] += np.sin(t / 10_000 ** (j / 10))
            z[:, j + 1] += np.cos(t / 10_000 ** (j / 10))
        for i, (norm, linear) in enumerate(zip(model.norms, model.maps, strict=True)):
            z = norm(z) @ linear.weight.T + linear.bias
            z = z if i == 2 else torch.nn.functional.gelu(z)
        assert_close(logits[:, t], z)


def test_the_auto_encoder_ignores_padding_and_can_be_saved(block, tmp_path):
    model = AutoEncoderSpec(block, vocabulary=16).build()
    x = torch.randint(16, (2, 7))
    padded = torch.cat((x, torch.zeros(2, 3, dtype=torch.int64)), 1)
    assert_close(model(padded, lengths=torch.tensor([7, 7]))[0][:, :7], model(x)[0])
    save(model, tmp_path / "model.safetensors")
    assert_close(load(tmp_path / "model.safetensors")(x)[0], model(x)[0])
    with pytest.raises(InputError, match="takes \\(batch, time\\) tokens"):
        model(torch.randn(2, 3))
    with pytest.raises(SpecError, match="must be a BlockSpec"):
        AutoEncoderSpec(ADPTNet.paper(4).spec)


def test_the_block_of_the_suite_matches_its_definition(tmp_path):
    assert SwiGLUBlockSpec(ADPTNet.paper(128).spec).inner == 352
    spec = SwiGLUBlockSpec(Mamba(10, state_size=4))
    block = spec.build()
    x = torch.randn(2, 7, 10)
    z = x + block.layer(block.norm(x))[0]
    gate, value = (block.unit_norm(z) @ block.enter.weight.T).chunk(2, -1)
    expected = z + (gate * torch.sigmoid(gate) * value) @ block.leave.weight.T
    assert_close(block(x)[0], expected)
    padded = torch.cat((x, torch.full((2, 3, 10), torch.nan)), 1)
    assert_close(block(padded, lengths=torch.tensor([7, 7]))[0][:, :7], expected)
    model = MadInContextRecall().model(spec, depth=2).build()
    tokens = torch.randint(16, (2, 5))
    logits, state = model(tokens[:, :4])
    assert_close(model.step(tokens[:, 4], state)[0], model(tokens)[0][:, 4])
    save(model, tmp_path / "model.safetensors")
    assert_close(load(tmp_path / "model.safetensors")(tokens[:, :4])[0], logits)
    assert MadCompression().model(spec).build()(tokens)[0].shape == (2, 5, 16)
    with pytest.raises(SpecError, match="Perhaps you meant 'rms'"):
        SwiGLUBlockSpec(ADPTNet.paper(4).spec, norm="rmsn")
    with pytest.raises(SpecError, match="must be a LayerSpec, BidirectionalSpec or MixerSpec"):
        SwiGLUBlockSpec(Mamba)
