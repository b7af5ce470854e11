"""Tests of word problems and of the base classes of tasks, against brute force and published facts."""

import itertools
import time

import pytest
import torch
from torch.nn.functional import one_hot

from adptnet import Spec
from adptnet.errors import InputError, SpecError
from adptnet.spec import spec
from adptnet_lab.tasks import TASKS, Batch, FiniteTask, GeneratedTask, WordProblem, format_product_table, product_table
from adptnet_lab.tasks.base import make_generator


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("S3", 6), ("S4", 24), ("S5", 120), ("A4", 12), ("A5", 60), ("Z7", 7), ("S1", 1)),
        *(("D1", 2), ("D5", 10), ("Q8", 8), ("S3xZ2", 12), ("Z2xD3xZ2", 24), ("0 1 2; 1 2 0; 2 0 1", 3)),
    ],
)
def test_a_product_table_is_a_group(name, size):
    table = product_table(name)
    assert table.shape == (size, size)
    elements = torch.arange(size)
    assert torch.equal(table[0], elements)  # 0 is the left and right identity
    assert torch.equal(table[:, 0], elements)
    for line in (*table, *table.T):
        assert torch.equal(line.sort().values, elements)
    p, q, r = torch.randint(size, (3, 500))
    assert torch.equal(table[table[p, q], r], table[p, table[q, r]])


def test_permutations_are_in_lexicographic_order_and_compose_right_to_left():
    elements = list(itertools.permutations(range(5)))
    table = product_table("S5")
    for p, q in torch.randint(120, (200, 2)).tolist():
        composed = tuple(elements[p][elements[q][i]] for i in range(5))
        assert elements[table[p, q]] == composed


def test_s3_is_not_commutative_and_z6_is():
    assert not torch.equal(product_table("S3"), product_table("S3").T)
    assert torch.equal(product_table("Z6"), product_table("Z6").T)


def test_a_product_table_can_be_changed_without_harm():
    table = product_table("S3")
    table.zero_()
    assert product_table("S3").any()


@pytest.mark.parametrize(
    "name", ["S0", "S7", "E4", "s3", "S", "Z0", "S3 ", "Q6", "D", "D2000", "S3x", "S3xX2", "", " "]
)
def test_an_unknown_group_raises(name):
    with pytest.raises(InputError, match="Groups are S3, A5, Z6"):
        product_table(name)


def orders(name):
    """Count the elements of each order, which distinguishes all groups below."""
    table = product_table(name)
    counts = {}
    for element in range(len(table)):
        power, order = element, 1
        while power != 0:
            power, order = int(table[power, element]), order + 1
        counts[order] = counts.get(order, 0) + 1
    return counts


def test_groups_have_the_orders_of_elements_that_their_names_imply():
    assert orders("D4") == {1: 1, 2: 5, 4: 2}
    assert orders("Q8") == {1: 1, 2: 1, 4: 6}
    assert orders("Z2xZ4") == {1: 1, 2: 3, 4: 4}
    assert orders("D3") == orders("S3")
    assert orders("Z2xZ3") == orders("Z6")
    assert orders("A5") == {1: 1, 2: 15, 3: 20, 5: 24}
    i, j, k = 1, 2, 3
    table = product_table("Q8")
    assert [int(table[i, j]), int(table[j, i]), int(table[i, i])] == [k, k + 4, 4]


def test_a_user_provided_table_works_like_a_named_group():
    own = format_product_table(product_table("D4"))
    task = WordProblem(own, length=5)
    assert Spec.from_json(task.to_json()) == task
    named = WordProblem("D4", length=5)
    mine, theirs = (each.batch(9, torch.Generator().manual_seed(2)) for each in (task, named))
    assert torch.equal(mine.targets, theirs.targets)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("0 1; 1", r"square.*2 rows of \[1, 2\]"),
        ("0 1; 1 2", "2 is not an element"),
        ("1 0; 0 1", "element 0 must be the identity"),
        ("0 1; 1 1", "row 1 lacks elements, so 1 has no inverse"),
        ("0 1 2 3 4; 1 0 3 4 2; 2 4 0 1 3; 3 2 4 0 1; 4 3 1 2 0", r"is not \d·\(\d·\d\)"),
    ],
)
def test_a_table_that_is_not_a_group_raises_with_the_reason(table, reason):
    with pytest.raises(InputError, match=reason):
        product_table(table)
    with pytest.raises(InputError, match="integers; got"):
        format_product_table(torch.ones(2, 2))


def test_elements_are_replaced_by_the_identity_with_the_given_probability():
    inputs = WordProblem("S5", identity=0.5).batch(4000, torch.Generator().manual_seed(0)).inputs
    assert float((inputs == 0).double().mean()) == pytest.approx(0.5 + 0.5 / 120, abs=0.01)
    with pytest.raises(SpecError, match="identity must be in"):
        WordProblem(identity=1.0)


@pytest.mark.parametrize("group", ["S3", "A5", "Z4", "Z2xQ8"])
def test_targets_are_the_running_product(group):
    task = WordProblem(group, length=9)
    batch = task.batch(50, torch.Generator().manual_seed(1))
    table = product_table(group)
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        product = 0
        for x, y in zip(inputs, targets, strict=True):
            product = int(table[product, x])
            assert y == product


def test_batches_are_reproducible_and_uniform():
    task = WordProblem("S3")
    first, second = (task.batch(4000, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    share = torch.bincount(first.inputs.flatten()) / first.inputs.numel()
    assert (share - 1 / 6).abs().max() < 0.01
    assert task.batch(3, torch.Generator(), length=20).targets.shape == (3, 20)


def test_the_reported_accuracy_is_over_the_last_ten_positions():
    task = WordProblem("S5", length=16)
    targets = torch.zeros(1, 16, dtype=torch.int64)
    predictions = targets.clone()
    predictions[0, 6:11] = 1  # five of the last ten wrong
    scores = task.scores(one_hot(predictions, task.vocabulary), targets)
    assert scores["accuracy"] == 0.5
    assert scores["all_positions"] == 11 / 16
    assert scores["last_token"] == 1
    assert scores["whole_sequence"] == 0
    assert scores["per_position"] == [1.0] * 6 + [0.0] * 5 + [1.0] * 5
    assert task.chance == 1 / 120


def test_two_correct_positions_of_eight_score_a_quarter():
    task = WordProblem("S5", length=8)
    targets = torch.zeros(3, 8, dtype=torch.int64)
    predictions = torch.ones_like(targets)
    predictions[:, :2] = 0
    assert task.scores(one_hot(predictions, task.vocabulary), targets)["accuracy"] == 0.25


def test_a_task_is_a_spec_and_rejects_invalid_sizes():
    task = WordProblem("A5", length=12)
    assert Spec.from_json(task.to_json()) == task
    with pytest.raises(SpecError, match="length must be an integer >= 1"):
        WordProblem(length=0)
    with pytest.raises(InputError, match="unknown"):
        WordProblem("X8")
    with pytest.raises(InputError, match="both must be at least 1"):
        task.batch(0, torch.Generator())


def test_a_training_batch_depends_on_seed_and_step_alone():
    task = WordProblem("S3")
    assert torch.equal(task.training_batch(7, 16, 3).inputs, task.training_batch(7, 16, 3).inputs)
    for step, seed in ((8, 3), (7, 4), (3, 7)):
        assert not torch.equal(task.training_batch(step, 16, seed).inputs, task.training_batch(7, 16, 3).inputs)


@spec
class Numbered(FiniteTask):
    """Task whose sequence i is the number i."""

    total: int = 10
    chance = 0.0
    output_size = 1

    def size(self, split):
        return self.total

    def examples(self, split, indices, *, length=None):
        return Batch(indices.unsqueeze(1), indices.unsqueeze(1))

    def scores(self, outputs, targets):
        return {"accuracy": 0.0}


@pytest.mark.parametrize("size", [1, 3, 4, 10])
def test_every_epoch_of_a_finite_task_visits_every_sequence_once_in_a_new_order(size):
    task = Numbered()
    visited = torch.cat([task.training_batch(step, size, 0).inputs[:, 0] for step in range(60 // size)])
    epochs = visited[: len(visited) // 10 * 10].reshape(-1, 10)
    assert torch.equal(epochs.sort().values, torch.arange(10).expand(len(epochs), 10))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == len(epochs)
    with pytest.raises(InputError, match="batch of 11 is larger than the 10 training sequences"):
        task.training_batch(0, 11, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(TASKS) - {"sequential-image", "event-frames", "text", "forecast"}))
def test_one_core_generates_a_million_tokens_per_second(name):
    task, times = TASKS[name](), []
    for seed in range(5):
        start = time.process_time()
        tokens = sum(_draw(task, make_generator(seed, number)).inputs.numel() for number in range(8))
        times.append((time.process_time() - start) / tokens)
    assert min(times) < 1e-6


def _draw(task, generator):
    fixed = isinstance(task, GeneratedTask)
    return task.draw(128, generator, length=task.length) if fixed else task.batch(128, generator)
