"""`adptnet card`: a published folder holds the model of the run, its scores, and code that runs as written."""

import re
import shlex

import numpy as np
import pytest
import torch

import adptnet
from adptnet import cells, nn
from adptnet_lab.cli import main
from adptnet_lab.cli.command_line import make_command
from adptnet_lab.cli.draft import default_draft
from adptnet_lab.cli.spec_flags import apply_flags
from adptnet_lab.tasks import WordProblem
from adptnet_lab.training import Experiment, TrainConfig, load_model, read_experiment, read_result, run


def train(folder, task, *flags):
    settings = ["--training.steps", "2", "--training.batch-size", "4", "--training.evaluation-size", "4"]
    assert main(["train", task, *flags, "--model.width", "8", *settings, "--output", str(folder)]) == 0


def read_code(card):
    return re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]


def read_command(card):
    return shlex.split(re.search(r"^adptnet train .*", card, re.MULTILINE)[0])


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "poem.txt").write_text("It was many and many a year ago, in a kingdom by the sea.\n" * 40)
    frames = np.random.default_rng(0).poisson(0.3, (40, 12, 6)).astype(np.uint8)
    np.savez(folder / "frames.npz", frames=frames, label=np.arange(40) % 4, speaker=np.arange(40) % 5)
    return folder


TASKS_AND_FLAGS = {
    "words": ["word-problem", "--training.lengths", "5", "9"],
    "copying": ["selective-copy", "--task.length", "70", "--task.symbols", "2"],
    "characters": ["text", "--task.path", "{data}/poem.txt", "--task.length", "16", "--model.depth", "2"],
    "bytes": ["text", "--task.path", "{data}/poem.txt", "--task.length", "16", "--task.symbols", "bytes"],
    "events": [
        *("event-frames", "--task.path", "{data}/frames.npz", "--task.test-speakers", "3", "4"),
        *("--task.no-masked", "--model.layer", "silif-network", "--model.depth", "1"),
    ],
    "series": ["forecast"],
}


@pytest.mark.parametrize("kind", TASKS_AND_FLAGS)
def test_a_card_describes_its_run_and_its_code_runs_as_written(kind, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train("run", *(flag.format(data=data) for flag in TASKS_AND_FLAGS[kind]))
    assert main(["card", "run", f"cards/{kind}", "--license", "apache-2.0"]) == 0
    folder = tmp_path / "cards" / kind
    card, result = (folder / "README.md").read_text(), read_result(folder)

    model, expected = adptnet.load(folder).eval(), load_model(tmp_path / "run").eval()
    task = read_experiment(tmp_path / "run").task
    inputs = next(iter(task.evaluation("test", 3, 3))).inputs
    assert torch.equal(model(inputs)[0], expected(inputs)[0])
    adptnet.save(model, tmp_path / "again.safetensors")  # the file that push_to_hub uploads
    assert (tmp_path / "again.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()

    capsys.readouterr()
    torch.manual_seed(0)
    exec(compile(read_code(card), "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()

    assert result == read_result(tmp_path / "run")
    for length, scores in result["test"].items():
        assert f"| {length} | " + " | ".join(f"{v:.4f}" for v in scores.values() if isinstance(v, float)) in card
    count = sum(parameter.numel() for parameter in expected.parameters())
    assert f"{count:,} parameters" in card
    assert str(expected.spec) in card
    assert f"seed {read_experiment(tmp_path / 'run').training.seed} " in card
    for file in folder.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes(), file.name  # no path of this machine

    monkeypatch.chdir(data)
    assert main([*read_command(card)[1:], "--output", str(tmp_path / "same")]) == 0
    same = load_model(tmp_path / "same").eval()
    assert torch.equal(same(inputs)[0], expected(inputs)[0])


def test_the_metadata_are_those_of_the_hub(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    train(tmp_path / "run", "word-problem")
    assert main(["card", str(tmp_path / "run"), str(tmp_path / "card"), "--repository", "ada/words"]) == 0
    text = (tmp_path / "card" / "README.md").read_text()
    metadata = hub.ModelCard(text).data
    assert (metadata.library_name, metadata.license, metadata.model_name) == ("adptnet", None, "words")
    scores = read_result(tmp_path / "run")["test"]["8"]
    found = {each.metric_type: each.metric_value for each in metadata.eval_results}
    assert found == {name: pytest.approx(scores[name], abs=1e-6) for name in found}
    assert found.keys() == {name for name, value in scores.items() if isinstance(value, float)}
    assert 'adptnet.load("ada/words")' in text


def test_folders_that_hold_something_else_are_left_alone(tmp_path, capsys):
    run, other = tmp_path / "run", tmp_path / "other"
    assert main(["card", str(run), str(other)]) == 1
    train(run, "word-problem")
    other.mkdir()
    (other / "README.md").write_text("my own\n")
    capsys.readouterr()
    for folder, answer in ((other, "is not a card of adptnet"), (run, "is the folder of the run")):
        assert main(["card", str(run), str(folder)]) == 1
        assert answer in capsys.readouterr().err
    assert (other / "README.md").read_text() == "my own\n"
    (run / "result.json").unlink()
    assert main(["card", str(run), str(tmp_path / "new")]) == 1
    assert f"finished run: it has no result.json. Finish it: adptnet train --output {run} --resume" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--model.preset", "paper", "--model.layer", "gru", "--model.depth", "3"],
        ["--model.layer", "linear-adpt", "--model.width", "32", "--model.beta", "TrainableBeta(0.5)"],
        [
            *("--training.optimizer", "AdamW(betas=(0.9, 0.95))", "--training.stop-at", "0.5"),
            *("--training.evaluate-every", "5", "--training.clip", "None", "--training.snapshot-steps", "3", "4"),
        ],
    ],
)
def test_a_command_is_as_short_as_the_one_that_was_typed(flags):
    experiment = apply_flags(default_draft(WordProblem()), flags)
    assert len(make_command(experiment)) <= len(["adptnet", "train", "word-problem", *flags])


def test_a_model_that_no_flags_give_is_trained_again_from_its_config(tmp_path, monkeypatch):
    task = WordProblem()
    block = nn.BlockSpec(nn.GatedSpec(nn.LayerSpec(cells.ADPTSpec(6)), 6, taps=2))
    experiment = Experiment(task, task.model(block), TrainConfig(steps=1, batch_size=2, evaluation_size=2))
    assert make_command(experiment) is None
    run(experiment, tmp_path / "run")
    assert main(["card", str(tmp_path / "run"), str(tmp_path / "card")]) == 0
    monkeypatch.chdir(tmp_path / "card")
    assert main([*read_command((tmp_path / "card" / "README.md").read_text())[1:], "--output", "../same"]) == 0
    assert read_result(tmp_path / "same")["test"] == read_result(tmp_path / "run")["test"]
