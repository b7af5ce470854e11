"""`adptnet benchmark`: any callable from ids to logits is trained, tested and shown; nothing is trained twice."""

import json
import re

import pytest
import torch
from torch import nn

from adptnet.errors import InputError
from adptnet_lab import cli
from adptnet_lab.benchmarks.models import factory, page, suites, training
from adptnet_lab.benchmarks.models.known import KNOWN, find_known
from adptnet_lab.benchmarks.models.rows import COMMITTED, read_rows

CODE = """
import types
import torch

class Net(torch.nn.Module):
    def __init__(self, vocab_size, width=8):
        super().__init__()
        self.inner = torch.nn.Embedding(vocab_size, width)
        self.rnn = torch.nn.RNN(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, vocab_size)

    def forward(self, ids):
        return self.head(self.rnn(self.inner(ids))[0])

def make(vocabulary):
    return Net(vocabulary)

def wrapped(n, output_size, *, length):
    net = Net(n)
    class Callable:
        parameters = staticmethod(net.parameters)
        def __call__(self, ids):
            return types.SimpleNamespace(logits=net(ids), loss=None)
    return Callable()

def in_pair(**sizes):
    assert sorted(sizes) == ["length", "output_size", "parameters", "vocabulary"]
    net = Net(sizes["vocabulary"])
    return lambda ids: (net(ids), "state")

def in_mapping(vocabulary):
    net = Net(vocabulary)
    return lambda ids: {"logits": net(ids)}

def sees_the_future(vocabulary):
    net = Net(vocabulary)
    return lambda ids: net(ids.flip(1)).flip(1)

def wrong_shape(vocabulary):
    return Net(vocabulary + 1)

def diverges(vocabulary):
    net = Net(vocabulary)
    net.head.bias.data.fill_(float("nan"))
    return net

def asks_for_more(vocabulary, depth):
    return Net(vocabulary)

def parity(vocabulary):
    return lambda ids: 9.0 * torch.nn.functional.one_hot(ids.cumsum(-1) % 2, vocabulary).float()

nothing = None
instance = Net(3)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Work in a folder with a module of models and with budgets of a second."""
    (tmp_path / "my_models.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(suites, "SMALLEST_TEST", 4)
    tiny = suites.Budget(steps=2, batch_size=4, rates=(1e-3,), seeds=(0, 1), evaluation_size=4)
    monkeypatch.setitem(suites.BUDGETS, "small", tiny)
    return tmp_path


@pytest.mark.parametrize("name", ["make", "Net", "wrapped", "in_pair", "in_mapping"])
def test_factories_and_results_of_many_forms(name, here):
    for text in (f"my_models:{name}", f"{here / 'my_models.py'}:{name}"):
        model = factory.call_factory(factory.find_factory(text), vocabulary=5, output_size=5, length=32, parameters=9)
        logits, _ = model(torch.randint(5, (2, 7)))
        assert logits.shape == (2, 7, 5)
        assert model.has_parameters == (name in ("make", "Net", "wrapped"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("my_models", "write module:make_model"),
        ("gruu", "Perhaps you meant 'gru'"),
        ("absent_module:make", "there is no module 'absent_module'"),
        ("absent.py:make", "there is no such file"),
        ("my_models:mak", "has no 'mak'. Perhaps you meant 'make'"),
        ("my_models:nothing", "is a NoneType. Pass a function"),
        ("my_models:instance", "is a model. Pass a function that returns a new one"),
        ("my_models:sees_the_future", "is not causal"),
        ("my_models:wrong_shape", r"need logits of shape \(2, 8, 2\); got \(2, 8, 3\)"),
        ("my_models:asks_for_more", "requires 'depth'"),
    ],
)
def test_models_that_cannot_be_benchmarked_are_reported(text, message, here, capsys):
    assert cli.main(["benchmark", text, "--tasks", "Z2 (parity)"]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (here / "runs" / "benchmark" / "rows.jsonl").exists()


def test_runs_are_not_repeated_and_the_page_shows_them(here, capsys):
    command = ["benchmark", "my_models:make", "gru", "--tasks", "S3", "--output", "out"]
    assert cli.main(command) == 0
    rows = read_rows(here / "out" / "rows.jsonl")
    assert [(row["model"], row["seed"]) for row in rows] == [(m, s) for m in ("my_models:make", "gru") for s in (0, 1)]
    assert all(list(row["test"]) == ["1", "2", "4", "8", "16"] for row in rows)
    text = (here / "out" / "page.md").read_text()
    assert "| **my\\_models:make** |" in text
    assert "#### S3: accuracy, chance 16.7 %" in text
    before = (here / "out" / "rows.jsonl").read_bytes()
    (here / "out" / "rows.jsonl").write_bytes(before[: before.rindex(b"\n", 0, -1) + 40])  # the last row is cut off
    capsys.readouterr()
    assert cli.main(command) == 0
    assert "gru, rate 0.001, seed 1" in capsys.readouterr().out
    again = read_rows(here / "out" / "rows.jsonl")
    assert [{**row, "seconds": 0} for row in again] == [{**row, "seconds": 0} for row in rows]  # the same numbers


def test_changed_code_is_run_again_and_replaces_the_old_rows_of_the_page(here):
    command = ["benchmark", "my_models.py:make", "--tasks", "S3", "--seeds", "0", "--output", "out"]
    assert cli.main(command) == 0
    (here / "my_models.py").write_text(CODE.replace("width=8", "width=9"))
    assert cli.main(command) == 0
    rows = read_rows(here / "out" / "rows.jsonl")
    assert [row["parameters"] for row in rows] == [246, 294]
    assert "| 294\\* |" in (here / "out" / "page.md").read_text()
    assert "| 246\\* |" not in (here / "out" / "page.md").read_text()


def test_a_model_without_parameters_is_only_tested(here):
    assert cli.main(["benchmark", "my_models:parity", "--tasks", "Z2 (parity)", "--seeds", "0", "--output", "out"]) == 0
    (row,) = read_rows(here / "out" / "rows.jsonl")
    assert row["test"] == {"1": 1.0, "2": 1.0, "4": 1.0, "8": 1.0, "16": 1.0}
    assert row["parameters"] == 0


def test_a_model_that_diverges_has_a_row(here):
    assert cli.main(["benchmark", "my_models:diverges", "--tasks", "S3", "--seeds", "0", "--output", "out"]) == 0
    (row,) = read_rows(here / "out" / "rows.jsonl")
    assert row["test"] == {}
    assert row["validation"] is None
    assert "1 diverged" in (here / "out" / "page.md").read_text()


@pytest.mark.parametrize("suite", suites.SUITES)
def test_every_task_runs_at_every_length(suite, here):
    source = factory.find_factory("my_models:make")
    for name in suites.SUITES[suite].tasks:
        row = training.train_and_test(source, suite, name, suites.BUDGETS["small"], 1e-3, 0)
        assert len(row["test"]) == len(suites.FACTORS)
        assert 0 < row["chance"] < 1


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_have_the_parameter_count_of_their_suite(name):
    for label, suite in suites.SUITES.items():
        task = list(suite.tasks)[-1]
        model, _ = training.build(find_known(name, suite), label, task, 0)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert abs(count / suite.parameters - 1) < 0.06


def test_rates_are_chosen_by_validation_and_missing_runs_are_listed_with_their_cost():
    budget = {"name": "standard", "steps": 5, "batch_size": 2, "rates": [0.1, 0.2], "evaluation_size": 3}
    row = {
        "suite": "mqar", "task": "4 pairs", "model": "gru", "fingerprint": "", "budget": budget, "parameters": 60_000,
        "metric": "accuracy", "chance": 0.1, "seed": 0, "seconds": 7.0,
    }  # fmt: skip
    rows = [
        {**row, "rate": 0.1, "validation": 0.5, "test": {"1": 0.25, "2": 0.5}},
        {**row, "rate": 0.2, "validation": 0.6, "test": {"1": 0.75, "2": 0.5}},
        {**row, "rate": 0.2, "validation": 0.1, "test": {"1": 0.25, "2": 0.5}, "seed": 1},
    ]
    text = page.render_page(rows, ["mqar"], [])
    assert "| gru | 60,000 | 0.2 | 2 | 50.0 [25, 75] | 50.0 [50, 50] | – | – | – | 7 |" in text
    assert "- 4 pairs, gru: 1 of 4 runs (about 7 CPU s)" in text
    assert "- 4 pairs, mamba: 4 of 4 runs (about 28 CPU s, by the mean of the other models)" in text
    assert "- 8 pairs, gru: 4 of 4 runs (cost unknown)" in text


def test_committed_rows_are_of_known_models_and_real_budgets():
    rows = read_rows(COMMITTED)
    assert rows
    assert len(COMMITTED.read_text().splitlines()) == len(rows)
    assert {row["model"] for row in rows} <= set(KNOWN)
    for row in rows:
        budget = suites.BUDGETS[row["budget"]["name"]]
        assert (row["budget"]["steps"], row["budget"]["batch_size"]) == (budget.steps, budget.batch_size)
        assert row["task"] in suites.SUITES[row["suite"]].tasks
    json.dumps(rows, allow_nan=False)


def test_a_module_given_as_a_factory_argument_keeps_its_parameters():
    model = factory.LogitsModel(nn.Linear(2, 2), "x", 2)
    assert len(list(model.parameters())) == 2
    with pytest.raises(InputError, match=r"need logits of shape \(1, 2, 2\); got Tensor"):
        factory.LogitsModel(lambda ids: ids, "ids", 2)(torch.zeros(1, 2, dtype=torch.int64))
