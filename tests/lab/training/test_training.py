"""The training loop: seeded, able to learn, and explicit about failure."""

import json

import pytest
import torch

from adptnet import ADPTNet, SequenceModel, Spec, cells, nn
from adptnet.errors import IncompatibleError, InputError, SpecError
from adptnet.spec import rename_fields
from adptnet_lab._json_files import write_json
from adptnet_lab._runtime import describe_environment
from adptnet_lab.tasks import WordProblem
from adptnet_lab.training import AdamW, Linear, RMSprop, TrainConfig, TrainingDiverged, evaluate, train


def small(seed=0, beta=4.0):
    torch.manual_seed(seed)
    return SequenceModel(ADPTNet.paper(16, beta=beta).spec, vocabulary=2, norm="batch", dropout=0.1)


PARITY = WordProblem("Z2", length=6)


def test_the_same_seed_gives_the_same_numbers_whatever_ran_before():
    config = TrainConfig(steps=5, batch_size=8, seed=3)
    first = small()
    one = train(first, PARITY, config)
    torch.rand(100)
    second = small()
    two = train(second, PARITY, config)
    assert one.losses == two.losses
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    other = train(small(), PARITY, TrainConfig(steps=5, batch_size=8, seed=4))
    assert other.losses != one.losses


def test_a_call_of_train_uses_the_precision_of_its_settings():
    def losses(precision):
        return train(small().float(), PARITY, TrainConfig(steps=3, batch_size=8, precision=precision)).losses

    exact, outside, everywhere = losses("float32"), losses("bf16"), losses("bf16-all")
    assert exact != outside != everywhere != exact
    assert outside == pytest.approx(exact, rel=0.1)
    assert everywhere == pytest.approx(exact, rel=0.1)
    with pytest.raises(IncompatibleError, match=r"scales the loss. Pass strategy=detect_strategy\('fp16'\)"):
        losses("fp16")


def test_training_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(9)
    expected = torch.rand(2)
    model = SequenceModel(ADPTNet.paper(4).spec, vocabulary=2)
    torch.manual_seed(9)
    train(model, PARITY, TrainConfig(steps=2, batch_size=4))
    assert torch.equal(torch.rand(2), expected)


def test_parity_is_learnt_and_extends_beyond_the_trained_length():
    model = SequenceModel(nn.LayerSpec(cells.ReLURNN(16)), vocabulary=2, norm="batch")
    before = evaluate(model, PARITY, [6], size=256)[6]["accuracy"]
    record = train(model, PARITY, TrainConfig(steps=250, batch_size=64, learning_rate=5e-3))
    scores = evaluate(model, PARITY, [6, 12], size=256)
    assert before < 0.8
    assert record.losses[-1] < 0.1 * record.losses[0]
    assert scores[6]["accuracy"] > 0.99
    assert len(scores[12]["per_position"]) == 12


def test_evaluation_repeats_and_restores_the_mode():
    model = small().train()
    assert evaluate(model, PARITY, [6], size=100, batch_size=7) == evaluate(model, PARITY, [6], size=100, batch_size=7)
    assert model.training


def test_a_frozen_norm_stays_frozen_after_evaluation():
    model = SequenceModel(ADPTNet.paper(4).spec, vocabulary=2, norm="batch").train()
    model.norm.eval()
    evaluate(model, WordProblem("Z2", length=4), [4], size=8)
    assert model.training
    assert not model.norm.norm.training
    with pytest.raises(InputError, match="both must be at least 1"):
        evaluate(model, WordProblem("Z2"), [4], size=0)


def test_on_step_is_called_after_every_step():
    seen = []
    record = train(small(), PARITY, TrainConfig(steps=4, batch_size=4), on_step=lambda n, loss: seen.append((n, loss)))
    assert seen == list(enumerate(record.losses, 1))


def test_the_linear_schedule_rises_and_falls_linearly():
    rates = [Linear(warmup=0.1).rate(step, 100) for step in range(101)]
    assert rates[0] == 0
    assert rates[5] == 0.5
    assert rates[10] == 1
    assert rates[55] == 0.5
    assert rates[100] == 0
    assert Linear(warmup=0.0).rate(0, 10) == 1


def test_a_loss_that_is_not_finite_stops_the_run():
    model = small()
    with torch.no_grad():
        model.decoder.weight.fill_(torch.nan)
    with pytest.raises(TrainingDiverged, match="the loss was nan at step 1 of 3"):
        train(model, PARITY, TrainConfig(steps=3, batch_size=4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"batch_size": -1}, "batch_size must be"),
        ({"learning_rate": 0.0}, "learning_rate must be a positive number"),
        ({"clip": 0.0}, "clip must be a positive number"),
        ({"schedule": "cosin"}, "schedule"),
        ({"optimizer": AdamW}, r"Pass optimizer=AdamW\(\)"),
        ({"precision": "bf17"}, "Perhaps you meant 'bf16'"),
        ({"lengths": (8, 0)}, "lengths must be an integer >= 1"),
        ({"patience": 3}, "waits for evaluations"),
    ],
)
def test_impossible_settings_raise(fields, message):
    with pytest.raises(SpecError, match=message):
        TrainConfig(**fields)


def test_settings_survive_json():
    config = TrainConfig(steps=7, clip=None)
    assert Spec.from_json(config.to_json()) == config


def test_settings_written_before_a_field_was_renamed_can_be_read():
    config = TrainConfig(optimizer=RMSprop(momentum=0.5))
    earlier = config.to_json().replace('"optimizer"', '"optimiser"')
    assert earlier != config.to_json()
    assert Spec.from_json(earlier) == config
    assert rename_fields(json.loads(earlier)) == json.loads(config.to_json())
    both = earlier.replace('"optimiser"', '"optimizer": {"type": "Adam"}, "optimiser"')
    with pytest.raises(SpecError, match="TrainConfig has the field 'optimizer' twice, under its earlier name as well"):
        Spec.from_json(both)
    with pytest.raises(SpecError, match=r"has no field 'optimiserr'. Perhaps you meant 'optimizer'"):
        Spec.from_json(earlier.replace('"optimiser"', '"optimiserr"'))


def test_json_is_written_atomically(tmp_path):
    path = tmp_path / "deep" / "numbers.json"
    write_json(path, {"a": [1.5]})
    assert json.loads(path.read_text()) == {"a": [1.5]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": [1.5]}
    assert len(list(path.parent.iterdir())) == 1
    assert describe_environment()["torch"] == torch.__version__
