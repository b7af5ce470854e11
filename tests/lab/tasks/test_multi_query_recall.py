"""Multi-query associative recall: keys and values, queries, and targets, by their definition."""

import pytest
import torch

from adptnet.errors import InputError, SpecError
from adptnet_lab.tasks import MultiQueryRecall
from adptnet_lab.tasks.base import IGNORED, make_generator


@pytest.mark.parametrize(("pairs", "length", "vocabulary"), [(1, 4, 4), (4, 16, 10), (8, 33, 64), (8, 512, 65)])
def test_every_key_is_queried_once_and_its_value_is_the_target(pairs, length, vocabulary):
    task = MultiQueryRecall(vocabulary, pairs, length)
    inputs, targets, *_ = task.batch(20, make_generator(0))
    assert inputs.shape == targets.shape == (20, length)
    assert 0 <= inputs.min() <= inputs.max() < vocabulary
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        keys, values = row[: 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert max(keys) < vocabulary // 2 <= min(values)
        counted = [t for t, target in enumerate(wanted) if target != IGNORED]
        assert all(t >= 2 * pairs and t % 2 == 0 for t in counted)
        assert sorted(row[t] for t in counted) == sorted(keys)
        known = dict(zip(keys, values, strict=True))
        assert all(wanted[t] == known[row[t]] for t in counted)


def test_queries_come_early_unless_power_is_one():
    def mean_position(power):
        targets = MultiQueryRecall(64, 4, 256, power).batch(200, make_generator(0)).targets
        return float((targets != IGNORED).nonzero()[:, 1].double().mean())

    assert abs(mean_position(1.0) - (8 + 254) / 2) < 5
    assert mean_position(0.01) < 80


def test_batches_depend_on_step_and_seed_alone_and_scores_count_queries():
    task = MultiQueryRecall(pairs=2, length=8)
    first, again, other = (task.training_batch(step, 3, 0) for step in (0, 0, 1))
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, other.inputs)
    logits = torch.nn.functional.one_hot(first.targets.clamp(min=0), task.vocabulary).double()
    assert task.scores(logits, first.targets)["accuracy"] == 1.0
    assert task.batch(2, make_generator(1), length=40).inputs.shape == (2, 40)
    assert task.chance == 1 / 32


def test_sizes_that_do_not_fit_are_reported():
    with pytest.raises(SpecError, match=r"length=32 or more"):
        MultiQueryRecall(pairs=8, length=31)
    with pytest.raises(SpecError, match=r"Pass vocabulary=18 or more"):
        MultiQueryRecall(vocabulary=17, pairs=8)
    with pytest.raises(SpecError, match=r"length=16 or more"):
        MultiQueryRecall(pairs=4).batch(2, make_generator(0), length=15)
    with pytest.raises(InputError, match="must be at least 1"):
        MultiQueryRecall().batch(0, make_generator(0))
